from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.listing import rank_dumps
from stagescope_service.dumps.formats.msprobe_directory import find_places
from stagescope_service.dumps.records import Location
from stagescope_wire.schema import Part

Place = tuple[int | None, str | None, int | None]


def places(root: Path, *folders: str) -> dict[str, Place]:
    """Make a dump in each folder; return its (step, stage, rank)."""
    for folder in folders:
        (root / folder).mkdir(parents=True)
        (root / folder / "dump.json").write_text('{"data": {}}')
    found = rank_dumps(open_dump(root))
    return {
        str(each.directory.relative_to(root)): (
            each.location.step,
            each.location.stage,
            each.location.rank,
        )
        for each in found
    }


def test_stages_above_the_steps(tmp_path: Path) -> None:
    """As msprobe's guides for slime and verl set dump_path before each stage."""
    found = places(
        tmp_path,
        "ref_compute_log_prob/step0/rank0",
        "old_log_prob/step0/rank0",
        "actor_train/step0/rank0",
        "actor_train/step3/rank1",
        "actor_generate_sequences/step0",
        "saved/mine/step2/rank0",
    )
    assert found == {
        "ref_compute_log_prob/step0/rank0": (0, "ref_compute_log_prob", 0),
        "old_log_prob/step0/rank0": (0, "old_log_prob", 0),
        "actor_train/step0/rank0": (0, "actor_train", 0),
        "actor_train/step3/rank1": (3, "actor_train", 1),
        "actor_generate_sequences/step0": (0, "actor_generate_sequences", 0),
        "saved/mine/step2/rank0": (2, "mine", 0),
    }


def test_a_trainers_step_above_msprobes_own(tmp_path: Path) -> None:
    found = places(
        tmp_path,
        "step_5/step0/rank0",
        "actor_train/step_5/step0/rank0",
        "global_step_6/old_log_prob/host1/step0/rank0",
        "step7/host1/rank0",
    )
    assert found == {
        "step_5/step0/rank0": (5, None, 0),
        "actor_train/step_5/step0/rank0": (5, "actor_train", 0),
        "global_step_6/old_log_prob/host1/step0/rank0": (6, "old_log_prob", 0),
        "step7/host1/rank0": (7, None, 0),
    }


def test_a_stage_keeps_its_name_when_its_own_directory_is_opened(tmp_path: Path) -> None:
    places(tmp_path, "old_log_prob/step4/rank1", "my_run/step4/rank1")
    for inside in ("", "step4", "step4/rank1"):
        (found,) = rank_dumps(open_dump(tmp_path / "old_log_prob" / inside))
        assert found.location == Location(4, "old_log_prob", None, 1)
    # The name of a run is no stage.
    (found,) = rank_dumps(open_dump(tmp_path / "my_run"))
    assert found.location == Location(4, None, None, 1)


def test_engines_of_one_stage(tmp_path: Path) -> None:
    """Two processes with the same rank are kept apart by the name that differs."""
    found = places(
        tmp_path,
        "generate_sequence/4100/step0/rank0",
        "generate_sequence/4200/step0/rank0",
        "actor_train/77/step0/rank0",
        "actor_train/78/step0/rank1",
    )
    assert found == {
        "generate_sequence/4100/step0/rank0": (0, "generate_sequence/4100", 0),
        "generate_sequence/4200/step0/rank0": (0, "generate_sequence/4200", 0),
        "actor_train/77/step0/rank0": (0, "actor_train", 0),
        "actor_train/78/step0/rank1": (0, "actor_train", 1),
    }
    assert any("generate_sequence/4200" in note for note in notes(tmp_path))


def test_processes_without_a_rank_keep_their_number(tmp_path: Path) -> None:
    found = places(
        tmp_path, "step0/proc9", "step0/proc10", "step1/proc10", "eval/step0/pid5", "ref/step0/rank"
    )
    assert found == {
        "step0/proc9": (0, None, 0),
        "step0/proc10": (0, None, 1),
        "step1/proc10": (1, None, 1),
        "eval/step0/pid5": (0, "eval", 0),
        "ref/step0/rank": (0, "ref", 0),
    }
    assert "proc10 names no rank: shown as rank 1" in notes(tmp_path)


def test_a_process_that_was_started_again_is_one_rank(tmp_path: Path) -> None:
    assert {rank for _, _, rank in places(tmp_path, "step0/proc9", "step1/proc10").values()} == {0}


def test_a_process_without_a_rank_beside_ranks(tmp_path: Path) -> None:
    found = places(tmp_path, "step0/rank0", "step0/rank1", "step0/proc9")
    assert found["step0/proc9"] == (0, None, 2)


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


def test_a_dump_that_names_no_step(tmp_path: Path) -> None:
    assert places(tmp_path, "mine/rank3") == {"mine/rank3": (0, "mine", 3)}
    assert notes(tmp_path) == ["mine/rank3 names no step: taken as step 0"]


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


def notes(root: Path) -> list[str]:
    found = open_dump(root).about.get("notes", [])
    assert isinstance(found, list)
    return found
