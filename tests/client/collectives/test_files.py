"""Files of flight recorders: read in every layout; a bad one is named and costs no other one."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.client.collectives.recorders import call, dump, write

from stagescope.cli import main
from stagescope_wire.collectives.files import read_directory
from stagescope_wire.collectives.records import MAX_CALLS, RankRecord, parse, recorded
from stagescope_wire.errors import Forbidden, InvalidInput


def hang(folder: Path, backend: str) -> None:
    """Write the files of four ranks: rank 3 never enters the second all_gather of its group."""
    for rank in range(4):
        group = "1" if rank < 2 else "2"
        calls = [call("0", 1, backend=backend), call(group, 1, "all_gather", backend=backend)]
        if rank < 2:
            calls += [call(group, 2, "all_gather", backend=backend)]
            calls += [call("0", 2, done=False, backend=backend, line=30)]
        elif rank == 2:
            calls += [call(group, 2, "all_gather", done=False, backend=backend, line=20)]
        write(folder, rank, dump(rank, calls, backend=backend), backend=backend)


@pytest.mark.parametrize("backend", ["nccl", "hccl", "gloo"])
def test_the_files_of_a_hang_name_its_collective(tmp_path: Path, backend: str) -> None:
    hang(tmp_path, backend)
    shown = CliRunner().invoke(main, ["collectives", str(tmp_path), "--json"])
    first, second = json.loads(shown.stdout)["collectives"]
    assert first["message"] == (
        "rank 2 waits in all_gather #2 of ep (group 2); rank 3 has not entered it: the last call "
        "of rank 3 is all_gather #1 of group 2 at step (trainer.py:10)"
    )
    assert (first["verdict"], first["waiting"][0]["place"]) == (
        "not entered",
        "step (trainer.py:20)",
    )
    assert (second["verdict"], second["operation"], second["sequence"]) == (
        "behind",
        "all_reduce",
        2,
    )
    text = CliRunner().invoke(main, ["collectives", str(tmp_path)])
    assert (text.exit_code, "rank 2 waits in all_gather #2" in text.stdout) == (0, True)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


BAD = {
    "hostile": pickle.dumps({"entries": [Hostile()]}, 2),
    "memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "cut off": pickle.dumps(dump(3, [call("0", 1)]), 2)[:-40],
    "cut off JSON": json.dumps(dump(3, [call("0", 1)])).encode()[:-40],
    "empty": b"",
    "a list": pickle.dumps([1, 2], 2),
    "other JSON": b'{"a": 1}',
    "deep": b"{" + b'"a":{' * 200_000,
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    hang(tmp_path, "nccl")
    (tmp_path / "nccl_trace_rank_3").write_bytes(BAD[kind])
    files = read_directory(tmp_path)
    assert [*files.ranks] == [0, 1, 2]
    [why] = files.problems.values()
    assert ("may run code" in why) == (kind in ("hostile", "persistent"))
    assert not Path("ran").exists()
    shown = CliRunner().invoke(main, ["collectives", str(tmp_path)])
    assert shown.exit_code == 1
    assert "there is no record of rank 3" in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    "change",
    [
        {"entries": [None, 3, {}, {"process_group": []}, {"process_group": ["0"]}]},
        {"pg_status": [], "pg_config": "x"},
        {"pg_config": {"0": {"ranks": "[0, x, 1e9]"}, "1": None, "2": {"ranks": {"a": 1}}}},
    ],
)
def test_values_of_the_wrong_type_are_left_out(change: dict[str, Any]) -> None:
    good = dump(0, [call("0", 1), call("0", 2, done=False)])
    entries = [*change.get("entries", []), *good["entries"]]
    found = recorded([{**good, **change, "entries": entries}], rank=0)
    assert [each.sequence for each in found.groups[0].calls] == [1, 2] or found.groups
    wrong = {"sizes": 3, "input_sizes": [[None, "x"], 7], "input_dtypes": {"a": 1}, "frames": 9}
    odd = {**good, "entries": [{**good["entries"][0], **wrong}]}
    assert recorded([odd], rank=0).groups


def test_a_pickle_of_classes_is_refused_and_a_text_is_no_dump() -> None:
    with pytest.raises(Forbidden, match="may run code"):
        parse(pickle.dumps({"entries": [Path()]}, 2))
    with pytest.raises(InvalidInput, match="no dump of a flight recorder"):
        parse(pickle.dumps("entries"))


def test_only_the_newest_calls_and_those_that_wait_are_kept() -> None:
    calls = [call("0", number) for number in range(1, 200)]
    calls[9] = call("0", 10, done=False)
    found = recorded([dump(0, calls)], rank=0)
    [group] = [each for each in found.groups if each.name == "0"]
    assert [each.sequence for each in group.calls] == [10, *range(200 - MAX_CALLS, 200)]
    assert group.entered == 199
    assert RankRecord.of_wire(found.wire()) == found
    assert RankRecord.of_wire({"state": "recorded", "groups": 3}) is None
