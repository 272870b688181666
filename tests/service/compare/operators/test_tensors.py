"""Full tensors, compared by msprobe in a separate process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.support.dumps import capture
from tests.support.small_decoder import small_decoder

from stagescope.comparison_requests import Tensors
from stagescope.table import Table
from stagescope_service.compare.operators import tensors
from stagescope_service.compare.operators.tensors import (
    COLUMNS,
    TensorRow,
    compare_tensors,
    read_table,
)
from stagescope_service.dumps.msprobe.operator_table import write_operator_table
from stagescope_wire.errors import InvalidInput, NotFound

Dump = tuple[Path, Path]


def dump(directory: Path, changed: str | None = None, *, task: str = "tensor") -> Dump:
    """Return a dump's directory and its operator table."""
    model = small_decoder()
    if changed is not None:
        with torch.no_grad():
            model.get_parameter(changed).mul_(1.5)
    files = capture(directory, model, level="L1", task=task)
    write_operator_table(files, files / "operators.parquet")
    return files, files / "operators.parquet"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    return dump(tmp_path_factory.mktemp("plain"))


def compared(a: Dump, b: Dump) -> list[TensorRow]:
    return compare_tensors(a[0], b[0], (a[1], b[1]))


def test_msprobe_finds_the_changed_layer(plain: Dump, tmp_path: Path) -> None:
    rows = compared(plain, dump(tmp_path, "blocks.0.up.weight"))
    assert all(set(row) == set(COLUMNS.values()) for row in rows)
    differing = [row for row in rows if row["max_abs_error"]]
    first = differing[0]
    assert str(first["name"]).startswith("Functional.linear.2.forward")
    assert first["max_relative_error"] == pytest.approx(1 / 3, abs=1e-3)
    assert first["share_within_1e-3"] == 0.0
    assert (first["dtype_a"], first["shape_a"]) == ("float32", "[32, 16]")
    same = [row for row in rows if row["max_abs_error"] == 0.0]
    assert same
    assert all(row["share_within_1e-3"] in (1.0, None) for row in same)


def test_a_dump_without_tensors_is_refused(plain: Dump, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no tensors"):
        compared(plain, dump(tmp_path, task="statistics"))


def test_no_file_outside_the_dump_is_read(plain: Dump, tmp_path: Path) -> None:
    files, table = dump(tmp_path)
    target = next((files / "dump_tensor_data").iterdir())
    target.rename(tmp_path / "elsewhere.pt")
    target.symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(InvalidInput, match="links"):
        compared((files, table), plain)
    target.unlink()
    text = (files / "dump.json").read_text()
    (files / "dump.json").write_text(text.replace(target.name, "../../elsewhere.pt"))
    write_operator_table(files, table)
    with pytest.raises(InvalidInput, match="elsewhere"):
        compared(plain, (files, table))


def test_an_error_of_msprobe_is_reported(plain: Dump, tmp_path: Path) -> None:
    files, table = dump(tmp_path)
    (files / "dump.json").write_text('{"task": "tensor", "data": {')
    with pytest.raises(InvalidInput, match="msprobe made no table"):
        compared(plain, (files, table))


def test_it_ends_after_its_time_limit(plain: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "MAX_SECONDS", 0.05)
    with pytest.raises(InvalidInput, match="took over"):
        compared(plain, plain)


def test_odd_cells_are_numbers_or_unknown(tmp_path: Path) -> None:
    path = tmp_path / "compare_result.csv"
    path.write_text(
        "NPU Name,Bench Name,NPU Dtype,Bench Dtype,NPU Tensor Shape,Cosine,MaxAbsErr,"
        "MaxRelativeErr,NPU max,Bench max,Result\n"
        'x,y,torch.half,N/A,"[2, 6]",unsupported, inf,0.0322%,Nan,None,error\n'
        "x,x,<class 'float'>,N/A,[],,,,,,\ny,y,N/A,N/A,N/A,,,,,,\n"
    )
    rows = list(read_table(path))
    row = rows[0]
    assert (row["name"], row["name_b"], row["shape_a"]) == ("x", "y", "[2, 6]")
    assert (row["dtype_a"], row["dtype_b"], rows[1]["dtype_a"]) == ("half", None, "float")
    assert row["cosine"] is row["max_b"] is None
    assert row["max_abs_error"] == math.inf
    assert row["max_relative_error"] == pytest.approx(0.000322)
    assert isinstance(row["max_a"], float)
    assert math.isnan(row["max_a"])
    assert "error" not in row.values()
    lines = Tensors.from_table(Table.from_rows(rows[1:])).lines()
    assert "  float[] / -" in lines[2]
    assert not any("None" in line or "class" in line for line in lines)
    path.write_text("something,else\n1,2\n")
    with pytest.raises(InvalidInput, match="no table"):
        list(read_table(path))
