"""Copies of operator tables from other nodes, and the checksums that are remembered."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from stagescope_service.core.operators import TABLE_WRITTEN
from stagescope_service.store.artifacts import file_checksum
from stagescope_service.store.tables import OperatorTableRow
from stagescope_service.views.reading import operator_files
from stagescope_service.views.reading.operator_files import OperatorFiles


def row_of(file: Path, **fields: object) -> OperatorTableRow:
    known = {
        "digested_mark": 1, "mark": 1, "state": TABLE_WRITTEN, "reason": None, "path": str(file),
        "bytes": file.stat().st_size, "checksum": file_checksum(file), "node_id": "n1",
        "stage": "actor_update", "role": "actor", "rank": 0, "step": 5,
    }  # fmt: skip
    return cast("OperatorTableRow", {**known, **fields})


class Away:
    """Another node's files; a read of `held` lasts until the other table was fetched."""

    def __init__(self, files: dict[str, bytes], held: str) -> None:
        self.files, self.held = files, held
        self.is_reading = threading.Event()
        self.may_end = threading.Event()
        self.reads: list[str] = []

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        if offset == 0:
            self.reads.append(path)
        if path == self.held:
            self.is_reading.set()
            assert self.may_end.wait(30), "the other table waited for this one"
        return self.files[path][offset : offset + size]


def test_a_slow_copy_holds_up_no_other_and_is_fetched_once(tmp_path: Path) -> None:
    rows, files = {}, {}
    for name in ("slow", "quick"):
        path = tmp_path / name
        path.write_bytes(name.encode() * 1000)
        files[f"/node/{name}"] = path.read_bytes()
        rows[name] = row_of(path, path=f"/node/{name}")
    away = Away(files, "/node/slow")
    found = OperatorFiles(away, tmp_path / "copies")
    with ThreadPoolExecutor(2) as threads:
        slow = [threads.submit(found.path, rows["slow"]) for _ in range(2)]
        assert away.is_reading.wait(30)
        assert found.path(rows["quick"]).read_bytes() == files["/node/quick"]
        away.may_end.set()
        assert {each.result(30).read_bytes() for each in slow} == {files["/node/slow"]}
    assert away.reads.count("/node/slow") == 1
    assert not found._fetching


def test_few_checksums_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_files, "_MAX_CHECKSUMS", 3)
    found = OperatorFiles(Away({}, ""), tmp_path / "copies")
    paths = [tmp_path / f"{number}.parquet" for number in range(5)]
    for path in paths:
        path.write_bytes(path.name.encode())
        assert found.path(row_of(path)) == path
    found.path(row_of(paths[2]))  # the last used stays
    assert [*found._checksums] == [str(paths[number]) for number in (3, 4, 2)]
