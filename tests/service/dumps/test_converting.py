"""`stagescope convert`: what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.command_line import invoke
from tests.support.dump_files import (
    Batch,
    areal_file,
    hostile_torch_file,
    make_batch,
    nexrl_directory,
    same_contents,
    slime_rollout_file,
    slime_train_file,
)

from stagescope_service.dumps.converting import convert_files
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.content import read_content
from stagescope_service.dumps.pickles.torch_file import FileTensor, Unreadable
from stagescope_wire.errors import Conflict, InvalidInput, InvalidTensor, NotFound


def make(kind: str, path: Path, batch: Batch) -> Path:
    if kind.startswith("nexrl"):
        return nexrl_directory(path, mode=kind.removeprefix("nexrl_"))
    if kind == "slime":
        slime_rollout_file(path / "rollout/0.pt", batch)
        slime_train_file(path / "train/0.pt", batch)
        return path
    areal_file(path / "batch_data.pt", batch, form=kind)
    return path


@pytest.mark.parametrize(
    "kind",
    ["nexrl_self_hosted", "nexrl_remote_api", "nexrl_weaver", "slime", "dict", "list",
     "tensordict"],
)  # fmt: skip
def test_a_converted_dump_is_the_same_dump(tmp_path: Path, kind: str) -> None:
    source = make(kind, tmp_path / "a", make_batch(8, 24))
    assert convert_files(source, tmp_path / "b").failed == {}
    assert not list((tmp_path / "b").rglob("*.pt"))
    one, other = open_dump(source), open_dump(tmp_path / "b")
    assert (one.kind, len(one.entries)) == (other.kind, len(other.entries))
    assert len(other.problems) == len(one.problems)
    for first, second in zip(one.entries, other.entries, strict=True):
        same_contents(one.read(first), other.read(second))
        assert one.read(first).about == other.read(second).about


def test_every_plain_value_survives_conversion(tmp_path: Path) -> None:
    value = {
        "number": 1, "real": float("-inf"), "nan": float("nan"), "text": "ü\ud800", "none": None,
        "ints": list(range(20)), "floats": [0.5] * 20, "few": [1, 2], "big": [1 << 70] * 9,
        "mixed": [1, "a", {"$tensor": "5"}], "t": torch.ones(2, 3, dtype=torch.bfloat16),
        "$ints": 3, "complex": torch.zeros(2, dtype=torch.complex64), "bytes": b"x",
    }  # fmt: skip
    torch.save(value, tmp_path / "a.pt")
    convert_files(tmp_path / "a.pt", tmp_path / "b")
    found: Any = read_content(tmp_path / "b/a.json")
    assert isinstance(found["ints"], FileTensor)
    assert found["ints"].wire[2].tolist() == value["ints"]
    assert found["floats"].wire[2].tolist() == value["floats"]
    assert found["t"].wire[0] == "bfloat16"
    assert isinstance(found["complex"], Unreadable)
    assert isinstance(found["bytes"], Unreadable)
    for name in ("number", "real", "text", "none", "few", "big", "mixed", "$ints"):
        assert found[name] == value[name]
    assert np.isnan(found["nan"])


def test_a_file_that_holds_code_is_refused_by_name_and_the_others_converted(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    marker = tmp_path / "made"
    hostile_torch_file(tmp_path / "a/hostile.pt", marker)
    (tmp_path / "a/broken.pt").write_bytes(b"PK\x03\x04")
    torch.save({"fine": torch.ones(2)}, tmp_path / "a/fine.pt")
    result = invoke("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert said["files"] == 1
    assert {Path(path).stem for path in said["failed"]} == {"hostile", "broken"}
    assert f"needs {os.name}.system" in said["failed"][str(tmp_path / "a/hostile.pt")]
    assert not marker.exists()
    found: Any = read_content(tmp_path / "b/fine.json")
    assert found["fine"].wire[1] == (2,)
    (tmp_path / "a/hostile.pt").unlink()
    (tmp_path / "a/broken.pt").unlink()
    result = invoke("convert", str(tmp_path / "a"), str(tmp_path / "c"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"1 file in {tmp_path / 'c'}\n"


def test_the_target_is_empty_and_outside_of_the_source(tmp_path: Path) -> None:
    source = nexrl_directory(tmp_path / "a")
    with pytest.raises(Conflict):
        convert_files(source, source)
    with pytest.raises(InvalidInput, match="lies in"):
        convert_files(source, source / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match=r"no \.pt file"):
        convert_files(tmp_path / "empty", tmp_path / "b")


@pytest.mark.parametrize(
    "change",
    [
        {"content": {"$tensor": "../../etc/passwd"}},
        {"content": {"$ints": 99}},
        {"content": {"$ints": -1}},
        {"content": {"$ints": "a"}},
        {"content": {"$dict": 5}},
        {"stagescope_converted": 2},
        {},
    ],
)
def test_a_converted_file_that_was_changed_is_refused(
    tmp_path: Path, change: Mapping[str, object]
) -> None:
    torch.save({"a": list(range(20))}, tmp_path / "a.pt")
    convert_files(tmp_path / "a.pt", tmp_path / "b")
    path = tmp_path / "b/a.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, **change} if change else []))
    with pytest.raises(InvalidTensor):
        read_content(path)


def test_exports_by_the_command_line(tmp_path: Path) -> None:
    slime_rollout_file(tmp_path / "a.pt", make_batch(8, 16), rollout_id=3)
    result = invoke("export", str(tmp_path / "a.pt"), str(tmp_path / "b"), "--format", "jsonl")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("1 file, ")
    assert (tmp_path / "b/trajectory/step_000003.jsonl").exists()
    result = invoke("export", str(tmp_path / "a.pt"), str(tmp_path / "b"))
    assert "not empty" in result.stderr
    result = invoke("export", str(tmp_path / "a.pt"), str(tmp_path / "c"), "--step", "9", "--json")
    assert result.exit_code == 4
    assert "its steps: 3" in " ".join(result.stderr.split())


def test_help_loads_neither_torch_nor_the_readers() -> None:
    script = (
        "import sys; from stagescope_service.commands import dumping; "
        "assert not {'torch', 'numpy.random'} & {*sys.modules}, sys.modules.keys()"
    )
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": path}
    )
