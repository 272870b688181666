"""Whatever lies in a directory of dumps: refused with a clear word, and nothing is run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.dump_files import Runs, make_batch, nexrl_directory, verl_directory

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats import listing
from stagescope_service.dumps.records import Dump, DumpEntry
from stagescope_service.store.tensorfile import write_tensors
from stagescope_wire.errors import Forbidden, InvalidTensor, TooLarge


def entry_at(dump: Dump, path: Path) -> DumpEntry:
    return next(entry for entry in dump.entries if entry.path == path)


def test_a_pickled_call_in_a_dump(tmp_path: Path) -> None:
    marker = tmp_path / "made"
    torch.save({"rollout_id": 0, "samples": [], "x": Runs(f"touch {marker}")}, tmp_path / "0.pt")
    dump = open_dump(tmp_path / "0.pt")
    with pytest.raises(Forbidden, match=f"{os.name}.system"):
        dump.read(dump.entries[0])
    assert not marker.exists()


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_link_that_leads_out_is_refused(tmp_path: Path, is_absolute: bool) -> None:
    secret = tmp_path / "secret.pt"
    torch.save({"step": 0, "loss": 1.0}, secret)
    path = nexrl_directory(tmp_path / "a") / "loss/step_000000_rank0_micro1.pt"
    path.unlink()
    path.symlink_to(secret if is_absolute else "../../secret.pt")
    dump = open_dump(tmp_path / "a")
    kinds = {problem.path: problem.kind for problem in dump.problems}
    assert path not in {entry.path for entry in dump.entries}
    assert kinds[path] in ("refused", "missing")
    assert "refused" in {problem.kind for problem in dump.problems}


def test_links_inside_in_circles_and_to_directories(tmp_path: Path) -> None:
    root = nexrl_directory(tmp_path / "a")
    inside = root / "loss/step_000000_rank0_micro1.pt"
    shutil.copy(inside, root / "loss/kept.bin")
    inside.unlink()
    inside.symlink_to("kept.bin")
    (root / "loop").symlink_to("loop")
    (root / "again").symlink_to("loss")
    (tmp_path / "elsewhere").mkdir()
    (root / "out").symlink_to(tmp_path / "elsewhere")
    (root / "up").symlink_to("..")
    dump = open_dump(root)
    assert dump.read(entry_at(dump, inside)).numbers["loss"] is not None
    kinds = {problem.path.name: problem.kind for problem in dump.problems}
    assert kinds == {
        "loop": "unknown", "again": "unknown", "up": "unknown", "out": "refused",
        "kept.bin": "unknown",
    }  # fmt: skip


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_FILES", 5)
    nexrl_directory(tmp_path)
    with pytest.raises(TooLarge, match="more than 5 files"):
        open_dump(tmp_path)


def test_json_that_is_too_deep(tmp_path: Path) -> None:
    deep = '{"a":' * 200_000
    path = nexrl_directory(tmp_path / "a", suffix="jsonl") / "loss/step_000000_rank0_micro1.jsonl"
    path.write_text(deep)
    dump = open_dump(tmp_path / "a")
    with pytest.raises(InvalidTensor, match="nested too deeply"):
        dump.read(entry_at(dump, path))
    verl_directory(tmp_path / "v", make_batch(2, 4))
    (tmp_path / "v/2.jsonl").write_text(deep)
    assert [problem.kind for problem in open_dump(tmp_path / "v").problems] == ["damaged"]
    converted = tmp_path / "c/forward_data/step_000000_rank0_micro0.json"
    converted.parent.mkdir(parents=True)
    converted.write_text('{"stagescope_converted":1,"content":' + "[" * 900 + "]" * 900 + "}")
    dump = open_dump(tmp_path / "c")
    write_tensors(converted.with_suffix(".safetensors"), {})
    with pytest.raises(InvalidTensor, match="nested deeper"):
        dump.read(dump.entries[0])


def test_text_that_is_no_text(tmp_path: Path) -> None:
    path = nexrl_directory(tmp_path, suffix="jsonl") / "loss/step_000000_rank0_micro1.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    dump = open_dump(tmp_path)
    with pytest.raises(InvalidTensor, match="utf-8"):
        dump.read(entry_at(dump, path))
    path.write_text('{"step": ' + "9" * 5000 + "}")
    with pytest.raises(InvalidTensor):
        dump.read(entry_at(dump, path))
