from __future__ import annotations

import json
import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagescope_service.views.encoding import decode, encode, parse_nonfinite
from stagescope_wire.errors import InvalidInput

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def spelled(value: object) -> object:
    """The plain reference."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
    if isinstance(value, dict):
        return {key: spelled(item) for key, item in value.items()}
    return [spelled(item) for item in value] if isinstance(value, list) else value


@given(values)
def test_is_the_reference(value: object) -> None:
    assert json.loads(encode(value)) == spelled(value)


def test_null_is_no_number() -> None:
    assert encode({"a": None, "b": math.nan, "c": 0.0}) == b'{"a":null,"b":"nan","c":0.0}'


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_numpy_scalars_and_arrays(dtype: npt.DTypeLike) -> None:
    array = np.array([1.0, math.nan, math.inf, -math.inf], dtype)
    assert encode({"a": array, "b": array[1], "c": array[0]}) == (
        b'{"a":[1.0,"nan","inf","-inf"],"b":"nan","c":1.0}'
    )
    assert json.loads(encode(array[::2])) == [1.0, "inf"]


def test_integer_keys_and_sets() -> None:
    assert json.loads(encode({3: {2, 1}, "n": math.nan})) == {"3": [1, 2], "n": "nan"}


def test_what_has_no_json_form_is_an_error() -> None:
    with pytest.raises(TypeError):
        encode({"a": object()})


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b'{"a": NaN}', b"[Infinity]", b"[-Infinity]", b"\xff\xfe", b"[" * 100_000, b"1 2"],
)
def test_what_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidInput, match="not JSON"):
        decode(text)


def test_parse_nonfinite() -> None:
    nan = parse_nonfinite("nan")
    assert isinstance(nan, float)
    assert math.isnan(nan)
    assert parse_nonfinite("-inf") == -math.inf
    assert parse_nonfinite("other") == "other"
    assert parse_nonfinite(1.5) == 1.5


def test_json_that_is_nested_too_deep_is_refused() -> None:
    """To pickle what orjson still reads ended the process."""
    brackets = b"[" * 102, b"]" * 102
    assert decode(b"".join(brackets))
    for deeper in (b'{"x": %b}', b"[1, %b]"):
        with pytest.raises(InvalidInput, match="nested too deep"):
            decode(deeper % b"".join(brackets))
