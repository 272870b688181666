"""JSON as somebody may have spoiled it."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """Return JSON in which something, somewhere, is something else or is missing."""
    found = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        place = found
        while isinstance(place, dict | list) and place:
            keys = sorted(place) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(list(keys)))
            inner = place[key]
            if isinstance(inner, dict | list) and inner and draw(st.booleans()):
                place = inner
                continue
            if isinstance(place, dict) and draw(st.booleans()):
                del place[key]
            else:
                place[key] = draw(_JSON)
            break
    return found
