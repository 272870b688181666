from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.dump_files import own_directory, read_first
from tests.support.dumps import capture

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.listing import rank_dumps
from stagescope_wire.errors import Forbidden, NotFound
from stagescope_wire.schema import Part


def test_tensors_by_operator(tmp_path: Path) -> None:
    capture(tmp_path, task="tensor", level="L0")
    dump = open_dump(tmp_path)
    assert (dump.kind, dump.problems) == ("msprobe", [])
    assert len(rank_dumps(dump)) == 1
    forward = "Module.lm_head.Linear.forward.0.output.0"
    entry = next(entry for entry in dump.entries if entry.key == forward)
    place = entry.location
    assert (entry.section, place.step, place.stage) == ("other", 1, "actor_update")
    record = dump.read(entry)
    assert list(record.tensors) == [forward]
    assert record.tensors[forward][0] == "float32"
    assert any(entry.section == "gradients" for entry in dump.entries)


def test_statistics_alone_point_to_where_they_are_read(tmp_path: Path) -> None:
    capture(tmp_path, task="statistics", level="L0")
    # What msprobe was told, as users and ModelArts' collector keep it.
    for name in ("config.json", "configurations.json", "msprobe_config.json"):
        (tmp_path / name).write_text('{"task": "statistics"}')
    (tmp_path / "notes.txt").write_text("mine")
    dump = open_dump(tmp_path)
    assert dump.entries == []
    assert [each.path.name for each in dump.problems] == ["notes.txt"]
    assert "operators" in str(dump.about["operators_are_read_by"])


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("step3/rank1", (3, None, 1, Part())),
        ("step_7/actor_update/step0/rank2", (7, "actor_update", 2, Part())),
        ("step_7/actor_update/0.0.1.2/step0/rank2", (7, "actor_update", 2, Part(0, 0, 1, 2))),
        ("step0/proc123", (0, None, 0, Part())),
    ],
)
def test_places(tmp_path: Path, folder: str, expected: tuple[object, ...]) -> None:
    directory = tmp_path / folder
    (directory / "dump_tensor_data").mkdir(parents=True)
    (directory / "dump.json").write_text("{}")
    torch.save(torch.ones(2), directory / "dump_tensor_data/Torch.add.0.forward.output.0.pt")
    location = open_dump(tmp_path).entries[0].location
    assert (location.step, location.stage, location.rank, location.part) == expected
    assert open_dump(directory).entries[0].location == location


def test_a_tensor_that_is_more_than_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step0/rank0/dump_tensor_data").mkdir(parents=True)
    (tmp_path / "step0/rank0/dump.json").write_text("{}")
    torch.save(tmp_path, tmp_path / "step0/rank0/dump_tensor_data/x.pt")
    with pytest.raises(Forbidden):
        read_first(tmp_path)


def test_kept_files_beside_them_are_the_dump(tmp_path: Path) -> None:
    attempt = own_directory(tmp_path)
    directory = attempt / "step_0/actor_update/step0/rank0"
    directory.mkdir(parents=True)
    (directory / "dump.json").write_text("{}")
    assert open_dump(attempt).kind == "own"
    assert open_dump(attempt, kind="msprobe").kind == "msprobe"
    with pytest.raises(NotFound):
        open_dump(attempt / "step_0/actor_update/step0/rank0", kind="own")


@pytest.mark.parametrize("name", ["..x", "...", ".hidden"])
def test_a_hidden_directory_is_named(tmp_path: Path, name: str) -> None:
    for stage in (name, "stage"):
        directory = tmp_path / stage / "step0/rank0"
        directory.mkdir(parents=True)
        (directory / "dump.json").write_text("{}")
    (tmp_path / ".empty").mkdir()
    dump = open_dump(tmp_path)
    assert [each.location.stage for each in rank_dumps(dump)] == ["stage"]
    (problem,) = dump.problems
    assert problem.path == tmp_path / name
