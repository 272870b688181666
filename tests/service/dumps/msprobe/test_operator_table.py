"""Operator tables of real dumps, of odd records, and of what a crash leaves."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.dumps import Masked, capture, table, tabled
from tests.support.small_decoder import small_decoder

from stagescope_service.dumps.msprobe.json_window import JsonValue
from stagescope_service.dumps.msprobe.operator_query import read_stack
from stagescope_service.dumps.msprobe.operator_table import SUMMARY_KEY, write_operator_table
from stagescope_service.dumps.msprobe.operators import (
    Leaf,
    forward_name,
    leaves,
    non_finite_kind,
    parse_name,
    source_of,
)
from stagescope_wire.errors import InvalidInput, NotFound, StoreError


def stored_summary(path: Path) -> Any:
    """What the file says of itself."""
    return json.loads(pq.read_metadata(path).metadata[SUMMARY_KEY])


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, object]] = pq.read_table(path).to_pylist()
    return found


def dump(records: Mapping[str, object], **header: object) -> str:
    said = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    return json.dumps({**said, **header, "data": records}, indent=1)


@pytest.mark.parametrize("level", ["L0", "L1", "mix"])
@pytest.mark.parametrize(
    ("task", "mode"), [("statistics", None), ("statistics", "md5"), ("tensor", None)]
)
def test_every_leaf_of_a_real_dump_has_its_row(
    tmp_path: Path, level: str, task: str, mode: str | None
) -> None:
    directory = capture(tmp_path, level=level, task=task, mode=mode)
    summary = write_operator_table(directory, tmp_path / "operators.parquet")
    written = json.loads((directory / "dump.json").read_text())
    found = rows(tmp_path / "operators.parquet")
    assert list(dict.fromkeys(row["name"] for row in found)) == list(written["data"])
    assert (summary.task, summary.level, summary.framework) == (task, level, "pytorch")
    assert (summary.calls, summary.rows) == (len(written["data"]), len(found))
    assert (summary.done, summary.truncated_at, summary.problems) == (True, None, [])
    assert summary.bytes == (directory / "dump.json").stat().st_size
    tensors = [row for row in found if row["dtype"]]
    assert {row["dtype"] for row in tensors} == {"float32", "int64"}
    assert all((row["checksum"] is not None) == (mode == "md5") for row in tensors)
    named = {row["data_name"] for row in tensors} - {None}
    kept = {file.name for file in directory.glob("dump_tensor_data/*.pt")}
    assert named == kept
    assert bool(kept) == (task == "tensor")


def test_a_row_has_the_values_of_msprobe_and_the_source_line(tmp_path: Path) -> None:
    directory = capture(tmp_path, level="mix")
    write_operator_table(directory, tmp_path / "o.parquet")
    written = json.loads((directory / "dump.json").read_text())["data"]
    table_rows = rows(tmp_path / "o.parquet")
    found = {(row["name"], row["section"], row["index"]): row for row in table_rows}
    name = "Module.blocks.1.down.Linear.forward.0"
    row, tensor = found[name, "parameters", "weight"], written[name]["parameters"]["weight"]
    assert (row["min"], row["max"], row["mean"], row["norm"]) == (
        tensor["Min"], tensor["Max"], tensor["Mean"], tensor["Norm"],
    )  # fmt: skip
    names = (row["kind"], row["operator"], row["module_class"])
    assert names == ("Module", "blocks.1.down", "Linear")
    assert (row["call"], row["direction"], row["shape"]) == (0, "forward", [16, 32])
    assert row["parent"] == "Module.blocks.1.Block.forward.0"
    # The line in the model's code, not torch's own that called the kernel.
    assert "small_decoder.py:" in row["source"]
    assert row["source"].endswith(" in forward")
    api = found["Functional.linear.7.forward", "output", "0"]
    assert api["parent"] == name
    assert (api["module_class"], api["source"]) == (None, row["source"])
    frames = read_stack(tmp_path / "o.parquet", api["stack_id"])
    assert any("return F.linear" in frame for frame in frames)
    backward = found["Functional.linear.7.backward", "output", "0"]
    assert (backward["source"], backward["direction"]) == (api["source"], "backward")
    gradient = found["Module.blocks.1.down.Linear.parameters_grad.0", "grad", "weight"]
    assert gradient["shape"] == [16, 32]


def test_non_finite_numbers_are_kept_and_unknown_ones_are_null(tmp_path: Path) -> None:
    model = small_decoder()
    model.get_parameter("blocks.1.down.weight").data[0, 0] = math.nan
    found = rows(table(tmp_path, model, level="L0"))
    name = ("blocks.1.down", "parameters")
    weight = next(row for row in found if (row["operator"], row["section"]) == name)
    assert math.isnan(weight["max"])
    assert weight["non_finite"] == "nan"
    # msprobe says no Norm of a float64.
    double = {"type": "torch.Tensor", "dtype": "torch.float64", "shape": [1], "Max": 1.0,
              "Min": math.inf, "Mean": None, "Norm": None}  # fmt: skip
    path, _ = tabled(tmp_path / "made", dump({"Torch.a.0.forward": {"output": [double]}}))
    (row,) = rows(path)
    assert (row["max"], row["min"], row["mean"], row["norm"]) == (1.0, math.inf, None, None)


@pytest.mark.parametrize(
    ("numbers", "kind", "unmeasured"),
    [
        ({"Max": "nan", "Min": "nan"}, "nan", 0),
        ({"Max": "NaN\t", "Min": 1.0}, "nan", 0),
        ({"Max": "inf", "Min": "1.5"}, "+inf", 0),
        ({"Max": 1.0, "Min": "-Infinity"}, "-inf", 0),
        ({"Max": "2.5", "Min": "-1"}, None, 0),
        ({"Max": 1.0, "Min": 1.0, "Norm": math.nan}, "nan", 0),
        ({"Max": 1.0, "Min": 1.0, "Norm": math.inf}, None, 0),  # of float16
        ({"Max": None, "Min": None}, None, 1),
        ({"Max": "N/A", "Min": 1.0}, None, 1),
        ({}, None, 1),
        ({"shape": [0]}, None, 0),
        ({"dtype": "torch.int64"}, None, 0),
        ({"dtype": "BFloat16"}, None, 1),
    ],
)
def test_numbers_that_are_texts_and_numbers_that_are_unknown(
    tmp_path: Path, numbers: dict[str, object], kind: str | None, unmeasured: int
) -> None:
    tensor = {"type": "torch.Tensor", "dtype": "torch.float16", "shape": [2], **numbers}
    path, summary = tabled(tmp_path, dump({"Torch.a.0.forward": {"output": [tensor]}}))
    (row,) = rows(path)
    assert row["non_finite"] == kind
    assert repr(row["norm"]) == repr(numbers.get("Norm"))
    assert summary.unmeasured == unmeasured
    known = kind is not None or {"Max", "Min"} <= {*numbers}
    assert summary.measured == int(known and not unmeasured)


def test_the_summary_counts_and_names_the_first_infinity(tmp_path: Path) -> None:
    path = table(tmp_path, Masked(), level="L1")
    summary = stored_summary(path)
    bad = [row for row in rows(path) if row["non_finite"]]
    assert summary["non_finite_rows"] == len(bad) > 1
    assert summary["first_non_finite"] == {
        name: bad[0][name] for name in ("order", "name", "section", "index", "non_finite")
    }
    assert bad[0]["non_finite"] == "-inf"


def test_level_debug_has_values_and_their_gradients(tmp_path: Path) -> None:
    directory = tmp_path / "rank0"
    directory.mkdir()
    tensor = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [3], "Max": 2.0,
              "Min": 1.0}  # fmt: skip
    nest = {"a": [tensor, {"type": "float", "value": 3.0}]}
    saved = {"adv.0.debug": tensor, "nest.1.debug": nest, "adv_grad.0.debug": None}
    (directory / "debug.json").write_text(dump(saved, level="debug"))
    summary = write_operator_table(directory, tmp_path / "o.parquet")
    found = [
        (row["operator"], row["kind"], row["call"], row["section"], row["index"], row["value"])
        for row in rows(tmp_path / "o.parquet")
    ]
    assert found == [
        ("adv", "Debug", 0, "output", "", None),
        ("nest", "Debug", 1, "output", "a.0", None),
        ("nest", "Debug", 1, "output", "a.1", "3.0"),
        ("adv_grad", "Debug", 0, "grad", "", None),
    ]
    assert (summary.level, summary.done) == ("debug", None)
    assert summary.problems == ["stack.json is not there", "construct.json is not there"]


def test_saved_values_beside_calls(tmp_path: Path) -> None:
    low, high = ({"type": "torch.Tensor", "dtype": "torch.float32", "shape": [3], "Max": 2.0,
                  "Min": value} for value in (1.0, math.nan))  # fmt: skip
    call = {"Torch.mul.0.forward": {"input_args": [low], "output": [low]}}
    (tmp_path / "dump.json").write_text(dump(call, level="L1"))
    saved = dump({"advantages.0.debug": low, "loss.0.debug": high}, level="debug")
    (tmp_path / "debug.json").write_text(saved)
    summary = write_operator_table(tmp_path, tmp_path / "o.parquet")
    found = rows(tmp_path / "o.parquet")
    assert [row["name"] for row in found] == [
        "Torch.mul.0.forward", "Torch.mul.0.forward", "advantages.0.debug", "loss.0.debug",
    ]  # fmt: skip
    assert [row["order"] for row in found] == [0, 0, 1, 2]
    assert (summary.level, summary.calls, summary.measured) == ("L1, debug", 3, 4)
    assert (summary.truncated_at, summary.non_finite_rows) == (None, 1)
    (tmp_path / "debug.json").write_text(saved[:-30])
    cut = write_operator_table(tmp_path, tmp_path / "o.parquet")
    assert cut.truncated_at == len(saved) - 30
    assert cut.problems[-1] == f"debug.json is cut off at byte {len(saved) - 30}"


@pytest.fixture(scope="module")
def real_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("dump"))


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.999])
def test_a_dump_truncated_by_a_crash_is_read_up_to_there(
    real_dump: Path, tmp_path: Path, share: float
) -> None:
    directory = tmp_path / "rank0"
    shutil.copytree(real_dump, directory)
    data = (directory / "dump.json").read_bytes()
    end = int(len(data) * share)
    (directory / "dump.json").write_bytes(data[:end])
    (directory / "DONE.json").unlink()
    summary = write_operator_table(directory, tmp_path / "o.parquet")
    write_operator_table(real_dump, tmp_path / "whole.parquet")
    found = rows(tmp_path / "o.parquet")
    assert found == rows(tmp_path / "whole.parquet")[: len(found)]
    assert (summary.truncated_at, summary.done, summary.rows) == (end, None, len(found))
    assert summary.last_name == (found[-1]["name"] if found else None)
    assert stored_summary(tmp_path / "o.parquet") == summary.fields()


@pytest.mark.parametrize("name", ["stack.json", "construct.json"])
@pytest.mark.parametrize("how", ["missing", "cut", "no JSON", "odd"])
def test_without_its_sidecars_a_dump_is_read_all_the_same(
    real_dump: Path, tmp_path: Path, name: str, how: str
) -> None:
    directory = tmp_path / "rank0"
    shutil.copytree(real_dump, directory)
    text = (directory / name).read_text()
    content = {"cut": text[: len(text) // 2], "no JSON": "{]", "odd": '{"0": 1, "1": [[1], 2]}'}
    (directory / name).unlink()
    if how != "missing":
        (directory / name).write_text(content[how])
    summary = write_operator_table(directory, tmp_path / "o.parquet")
    assert summary.rows == len(rows(tmp_path / "o.parquet")) > 100
    column = "source" if name == "stack.json" else "parent"
    known = [row[column] is not None for row in rows(tmp_path / "o.parquet")]
    if how == "odd":
        assert not any(known)
    else:
        assert len(summary.problems) == 1
        assert name in summary.problems[0]
        assert any(known) == (how == "cut")


@pytest.mark.parametrize("content", ['{"ok": false}', '{"ok": tru', "[]"])
def test_an_interrupted_stage_is_not_done(real_dump: Path, tmp_path: Path, content: str) -> None:
    directory = tmp_path / "rank0"
    shutil.copytree(real_dump, directory)
    (directory / "DONE.json").write_text(content)
    assert write_operator_table(directory, tmp_path / "o.parquet").done is False


@pytest.mark.parametrize("record", [[], 1, "text", None])
def test_a_record_that_is_no_object_is_an_error_and_changes_nothing(
    tmp_path: Path, record: object
) -> None:
    text = dump({"Torch.a.0.forward": {"output": []}, "Torch.b.0.forward": record})
    with pytest.raises(InvalidInput, match=r"Torch\.b\.0\.forward"):
        tabled(tmp_path, text)
    assert [file.name for file in tmp_path.iterdir()] == ["dump.json"]
    path, _ = tabled(tmp_path, dump({"Torch.a.0.forward": {"output": []}}))
    before = path.read_bytes()
    with pytest.raises(InvalidInput):
        tabled(tmp_path, text)
    assert path.read_bytes() == before


def test_an_argument_may_be_named_type_and_a_call_has_a_row_without_any() -> None:
    number: JsonValue = {"type": "int", "value": 3}
    named: JsonValue = {"type": number, "dtype": number, "shape": None}
    found = list(leaves("n", "forward", {"input_args": [], "input_kwargs": named}))
    assert [(leaf.path, leaf.type, leaf.value) for leaf in found] == [
        ("type", "int", "3"), ("dtype", "int", "3"), ("shape", None, None),
    ]  # fmt: skip
    record: JsonValue = {"input_args": [], "input_kwargs": {}, "output": []}
    assert list(leaves("Distributed.barrier.0.forward", "forward", record)) == [Leaf()]


def test_leaves_other_than_tensors_have_a_value() -> None:
    odd: list[JsonValue] = [
        {"type": "slice", "value": [0, None, 2]},
        {"type": "torch.memory_format", "format": "contiguous"},
        {"type": "float", "value": -math.inf},
        {"type": "torch.Tensor", "dtype": "torch.int8", "shape": [2.5], "Max": True,
         "Min": 10**400},
        {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1], "md5": 1.0,
         "placements": [{"Shard": {"dim": 0}}]},
        "\ud800",
    ]  # fmt: skip
    found = list(leaves("n", "forward", {"output": odd}))
    assert [leaf.value for leaf in found] == [
        "[0, null, 2]", '{"format": "contiguous"}', "-Infinity", None, None, "?",
    ]  # fmt: skip
    assert (found[3].shape, found[3].max, found[3].min) == (None, 1.0, None)
    assert (found[4].checksum, found[4].placements) == ("1.0", '[{"Shard": {"dim": 0}}]')


def test_a_record_nested_without_end_is_an_error() -> None:
    deep: Any = None
    for _ in range(500):
        deep = [deep]
    with pytest.raises(InvalidInput, match="nested"):
        list(leaves("n", "forward", {"output": deep}))


@given(st.recursive(st.none() | st.floats() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))  # fmt: skip
def test_any_record_fits_into_a_table(record: Any) -> None:
    for leaf in leaves("n", "forward", {"output": record}):
        assert len(leaf.path or "") <= 1000
        for text in (leaf.path, leaf.value, leaf.type):
            assert text is None or text.encode() is not None


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [
        (0.0, 1.0, None), (None, None, None), (-3.4028234663852886e38, 0.0, None),
        (math.nan, math.nan, "nan"), (-math.inf, math.inf, "inf"), (0.0, math.inf, "+inf"),
        (math.inf, math.inf, "+inf"), (-math.inf, 0.0, "-inf"), (-math.inf, -math.inf, "-inf"),
    ],
)  # fmt: skip
def test_the_kind_of_non_finite(low: float | None, high: float | None, kind: str | None) -> None:
    assert non_finite_kind(low, high) == kind


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Functional.linear.12.backward", ("Functional", "linear", None, 12, "backward")),
        ("Torch.linalg.norm.0.forward", ("Torch", "linalg.norm", None, 0, "forward")),
        ("Module.a.0.b.Linear.forward.3", ("Module", "a.0.b", "Linear", 3, "forward")),
        ("Module.Linear.parameters_grad.0", ("Module", "", "Linear", 0, "parameters_grad")),
        ("Module.a.Linear.parameters_grad", ("Module", "a", "Linear", None, "parameters_grad")),
        ("Cell.net.Dense.forward.0", ("Cell", "net", "Dense", 0, "forward")),
        ("x.y.0.debug", ("Debug", "x.y", None, 0, "debug")),
        ("../../etc/passwd", (None, "../../etc/passwd", None, None, None)),
        ("", (None, "", None, None, None)),
    ],
)
def test_names(name: str, parts: tuple[object, ...]) -> None:
    assert tuple(parse_name(name)) == parts


@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("Functional.linear.12.backward", "Functional.linear.12.forward"),
        ("Module.a.Linear.backward.3", "Module.a.Linear.forward.3"),
        ("Module.backward.Linear.forward.0", "Module.backward.Linear.forward.0"),
    ],
)
def test_the_forward_call_of_a_backward_call(name: str, forward: str) -> None:
    assert forward_name(name) == forward


def test_the_source_is_the_first_frame_of_the_models_own_code() -> None:
    theirs = [
        "File /venv/lib/site-packages/torch/nn/modules/linear.py, line 134, in forward, \n x",
        "File /opt/pytorch/torch/_tensor.py, line 5, in wrapped, \n x",
        "File /venv/lib/python3.11/site-packages/msprobe/pytorch/hook.py, line 9, in hook, \n x",
    ]
    own = "File /home/a, b/torch/model.py, line 7, in forward, \n y = self.up(x)"
    assert source_of([*theirs, own]) == "/home/a, b/torch/model.py:7 in forward"
    assert (source_of(theirs) or "").endswith("linear.py:134 in forward")
    assert source_of(["no call stack"]) is None
    # A user's own folder may be named so.
    mine = "File /home/me/msprobe/train.py, line 5, in loss, \n x"
    assert source_of([*theirs, mine]) == "/home/me/msprobe/train.py:5 in loss"


def test_row_groups_bound_the_memory(real_dump: Path, tmp_path: Path) -> None:
    write_operator_table(real_dump, tmp_path / "few.parquet", row_group=50)
    write_operator_table(real_dump, tmp_path / "one.parquet")
    file = pq.ParquetFile(tmp_path / "few.parquet")
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert set(sizes[:-1]) == {50}
    assert rows(tmp_path / "few.parquet") == rows(tmp_path / "one.parquet")


def test_no_dump_and_a_disk_that_refuses(real_dump: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="neither"):
        write_operator_table(tmp_path, tmp_path / "o.parquet")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        write_operator_table(real_dump, tmp_path / "file" / "o.parquet")
