"""Whatever plain values a file holds: torch.save, reading and converting give them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from stagescope_service.dumps.formats.columns import Columns, collect_rows
from stagescope_service.dumps.formats.content import read_content, write_content
from stagescope_service.dumps.pickles.torch_file import FileTensor
from stagescope_service.dumps.records import mapping

NAMES = st.text(max_size=8)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats() | st.text(max_size=8)
)
ARRAYS = arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
LISTS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20) | st.lists(
    st.floats(), max_size=20
)
TREES = st.recursive(
    SCALARS | LISTS | ARRAYS.map(torch.from_numpy),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def plain(value: Any) -> object:
    """Make what was read comparable: tensors and the lists that became some are lists."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype).removeprefix("torch."), tuple(value.shape), value.tolist())
    if isinstance(value, FileTensor):
        return (*value.wire[:2], value.wire[2].tolist())
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def same(found: Any, expected: Any) -> None:
    """Hold values against each other; NaN is itself, long lists of numbers may be tensors."""
    if isinstance(expected, list) and isinstance(found, tuple):
        found = found[2]
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            same(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        np.testing.assert_equal(found, expected)


@given(TREES)
@QUICK
def test_what_was_saved_is_read_and_converted(tmp_path: Path, tree: object) -> None:
    torch.save(tree, tmp_path / "a.pt")
    content = read_content(tmp_path / "a.pt")
    same(plain(content), plain(tree))
    write_content(tmp_path / "a.json", content)
    same(plain(read_content(tmp_path / "a.json")), plain(tree))


@given(st.lists(st.dictionaries(st.sampled_from("abc"), SCALARS | LISTS, max_size=3), max_size=6))
@QUICK
def test_no_value_of_a_row_is_dropped_silently(rows: list[dict[str, Any]]) -> None:
    found = collect_rows(rows)
    for name in {name for row in rows for name in row}:
        values = [row.get(name) for row in rows]
        there = sum(value is not None for value in values)
        locations = [name in found.tensors, name in found.texts, name in found.left_out]
        if name in found.texts:  # it may be said that it is kept as texts
            locations.pop()
        assert sum(locations) == (1 if there else 0)
        if 0 < there < len(values):
            assert mapping(found.about, "missing")[name] == len(values) - there
        if name in found.tensors:
            _, shape, flat, offsets = found.tensors[name]
            assert (shape[0] if offsets is None else len(offsets) - 1) == len(rows)
            expected = [
                item
                for value in values
                for item in (value if isinstance(value, list)
                             else [value] if offsets is None else [])
            ]  # fmt: skip
            # Of lists of numbers those that are none are nan, and named.
            odd = sum(isinstance(item, str) for item in expected)
            assert (odd > 0) <= any(each.column == name for each in found.odd)
            numbers = [np.nan if item is None or isinstance(item, str) else item
                       for item in expected]  # fmt: skip
            np.testing.assert_array_equal(flat, np.array(numbers, flat.dtype))


@pytest.mark.parametrize("wrong", [["step-1", None], [f"{row}.{row}" for row in range(1001)]])
def test_versions_that_cannot_be_read_cost_no_other_value(wrong: list[Any]) -> None:
    found = Columns()
    found.add("versions", wrong)
    found.add("rewards", [1.0, 2.0])
    assert found.left_out["versions"].startswith("versions has ")
    assert [*found.tensors] == ["rewards"]
    assert not found.about
    found.add("versions", ["step-1", "step-2"])
    assert found.tensors["versions"][2].tolist() == [1, 2]
