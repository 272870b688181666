"""JSON as somebody may have spoiled it."""

from __future__ import annotations

import copy

from hypothesis import strategies as st

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, value: object) -> object:
    """Return JSON in which something, somewhere, is something else or is missing."""
    found = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        location = found
        while isinstance(location, dict | list) and location:
            keys = sorted(location) if isinstance(location, dict) else range(len(location))
            key = draw(st.sampled_from(list(keys)))
            inner = location[key]
            if isinstance(inner, dict | list) and inner and draw(st.booleans()):
                location = inner
                continue
            if isinstance(location, dict) and draw(st.booleans()):
                del location[key]
            else:
                location[key] = draw(_JSON)
            break
    return found
