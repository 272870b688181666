from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.listing import rank_dumps
from stagescope_service.dumps.formats.msprobe_directory import find_places
from stagescope_service.dumps.records import Location, RankDump
from stagescope_wire.schema import Part

Place = tuple[int | None, str | None, int | None]


def make(root: Path, *folders: str) -> list[RankDump]:
    """Make a dump in each folder; return all that are found."""
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "dump.json").write_text('{"data": {}}')
    return [*rank_dumps(open_dump(root))]


def places(root: Path, *folders: str) -> dict[str, Place]:
    """Make a dump in each folder; return its (step, stage, rank)."""
    return {
        str(directory.relative_to(root)): (place.step, place.stage, place.rank)
        for directory, place in make(root, *folders)
    }


@pytest.mark.parametrize(
    "expected",
    [
        {  # as msprobe's guides for slime and verl set dump_path before each stage
            "ref_compute_log_prob/step0/rank0": (0, "ref_compute_log_prob", 0),
            "old_log_prob/step0/rank0": (0, "old_log_prob", 0),
            "actor_train/step0/rank0": (0, "actor_train", 0),
            "actor_train/step3/rank1": (3, "actor_train", 1),
            "actor_generate_sequences/step0": (0, "actor_generate_sequences", 0),
            "saved/mine/step2/rank0": (2, "mine", 0),
        },
        {  # a trainer's step above msprobe's own
            "step_5/step0/rank0": (5, None, 0),
            "actor_train/step_5/step0/rank0": (5, "actor_train", 0),
            "global_step_6/old_log_prob/host1/step0/rank0": (6, "old_log_prob", 0),
            "step7/host1/rank0": (7, None, 0),
        },
        {  # engines of one stage: the name that differs distinguishes processes of one rank
            "generate_sequence/4100/step0/rank0": (0, "generate_sequence/4100", 0),
            "generate_sequence/4200/step0/rank0": (0, "generate_sequence/4200", 0),
            "actor_train/77/step0/rank0": (0, "actor_train", 0),
            "actor_train/78/step0/rank1": (0, "actor_train", 1),
        },
        {  # processes without a rank keep their number
            "step0/proc9": (0, None, 0),
            "step0/proc10": (0, None, 1),
            "step1/proc10": (1, None, 1),
            "eval/step0/pid5": (0, "eval", 0),
            "ref/step0/rank": (0, "ref", 0),
        },
        # A process that was started again is one rank; beside ranks it is the next.
        {"step0/proc9": (0, None, 0), "step1/proc10": (1, None, 0)},
        {"step0/rank0": (0, None, 0), "step0/rank1": (0, None, 1), "step0/proc9": (0, None, 2)},
        {"mine/rank3": (0, "mine", 3)},
    ],
)
def test_names_give_the_places(tmp_path: Path, expected: dict[str, Place]) -> None:
    assert places(tmp_path, *expected) == expected


@pytest.mark.parametrize(
    ("folders", "note"),
    [
        (("generate_sequence/1/step0/rank0", "generate_sequence/2/step0/rank0"),
         "generate_sequence/2: a stage of its own, as another directory has its steps and ranks"),
        (("step0/proc9", "step0/proc10"), "proc10 names no rank: shown as rank 1"),
        (("mine/rank3",), "mine/rank3 names no step: taken as step 0"),
    ],
)  # fmt: skip
def test_what_the_names_lack_is_noted(tmp_path: Path, folders: tuple[str, ...], note: str) -> None:
    make(tmp_path, *folders)
    notes = open_dump(tmp_path).about["notes"]
    assert isinstance(notes, list)
    assert notes[-1] == note


def test_a_stage_keeps_its_name_when_its_own_directory_is_opened(tmp_path: Path) -> None:
    places(tmp_path, "old_log_prob/step4/rank1", "my_run/step4/rank1")
    for inside in ("", "step4", "step4/rank1"):
        (found,) = rank_dumps(open_dump(tmp_path / "old_log_prob" / inside))
        assert found.location == Location(4, "old_log_prob", None, 1)
    # The name of a run is no stage.
    (found,) = rank_dumps(open_dump(tmp_path / "my_run"))
    assert found.location == Location(4, None, None, 1)


@pytest.mark.parametrize(
    "folders",
    [
        # A rank that was recreated in the same attempt, and msprobe's own counter below a stage.
        ("step_5/actor_update/step0/rank0", "step_5/actor_update/again_1/step0/rank0"),
        ("step_5/actor_update/step0/rank0", "step_5/actor_update/step1/rank0"),
        ("first/step_5/actor_update/step0/rank0", "second/step_5/actor_update/step0/rank0"),
        ("step1/rank0", "step01/rank0"),
        ("100/step0/rank0", "200/step0/rank0"),
        ("a/x/step0/rank0", "b/x/step0/rank0"),
        ("step0/rank0", "step0/proc1/rank0"),
        ("rank0", "step0/rank0"),
    ],
)
def test_no_two_directories_share_a_place(tmp_path: Path, folders: tuple[str, ...]) -> None:
    found = places(tmp_path, *folders)
    assert found.keys() == {*folders}
    assert len({*found.values()}) == len(folders)


def test_what_cannot_be_kept_apart_is_named(tmp_path: Path) -> None:
    found = places(tmp_path, "step0/rank0", "step0/rank00", "step1/rank0")
    assert found == {"step0/rank0": (0, None, 0), "step1/rank0": (1, None, 0)}
    (problem,) = open_dump(tmp_path).problems
    assert problem.kind == "refused"
    assert problem.path == tmp_path / "step0/rank00"
    assert str(tmp_path / "step0/rank0") in problem.message


def test_one_step_of_statistics(tmp_path: Path) -> None:
    places(tmp_path, "step0/rank0", "step1/rank0")
    (found,) = rank_dumps(open_dump(tmp_path, step=1))
    assert found.directory == tmp_path / "step1/rank0"
    with pytest.raises(Exception, match="one of its steps: 0, 1"):
        open_dump(tmp_path, step=2)


def test_the_place_that_a_capture_wrote(tmp_path: Path) -> None:
    directory = tmp_path / "step_2/compute_values/again_1/step0/rank3"
    directory.mkdir(parents=True)
    done = {"ok": True, "step": 2, "stage": "compute values", "part": "0.0.1.2", "role": "critic",
            "rank": 3}  # fmt: skip
    (directory / "DONE.json").write_text(json.dumps(done))
    (found,) = find_places(tmp_path, [directory]).ranks
    assert found.location == Location(2, "compute values", "critic", 3, Part(0, 0, 1, 2))
