"""Directories that msprobe wrote by itself, with statistics alone, taken in as a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.dump_files import own_directory
from tests.support.dumps import capture
from tests.support.small_decoder import small_decoder

import stagescope
from stagescope_service.commands.importing import import_dump
from stagescope_service.dumps.discover import open_dump
from stagescope_wire.errors import NotFound

FILES = ("dump.json", "stack.json", "construct.json")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 3 and 5 of two ranks, as msprobe's default task writes them; rank 1 has a NaN in 5."""
    made, root = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("msprobe")
    broken = small_decoder()
    with torch.no_grad():
        broken.get_parameter("blocks.1.down.weight")[3, 5] = float("nan")
    plain, nan = capture(made / "plain", small_decoder()), capture(made / "nan", broken)
    for step in (3, 5):
        for rank in range(2):
            source = nan if (step, rank) == (5, 1) else plain
            target = root / f"step{step}" / f"rank{rank}"
            target.mkdir(parents=True)
            for name in FILES:
                shutil.copy(source / name, target / name)
    return root


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture(scope="module")
def session(running: Service) -> Iterator[stagescope.Session]:
    with running.session("operate") as found:
        yield found


TENSOR = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [3]}


def lay(root: Path, text: str, rank: str = "step0/rank0", name: str = "dump.json") -> Path:
    """Write a file of msprobe's below a directory."""
    (root / rank).mkdir(parents=True, exist_ok=True)
    (root / rank / name).write_text(text)
    return root


def test_statistics_of_operators_become_a_run(session: stagescope.Session, directory: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}
    report = import_dump(session, open_dump(directory), "dumped")
    assert (report["operators"], report["problems"], report["refused"]) == (4, [], [])
    step = session.step(5, run="dumped")
    table = step.operators(rank=0)
    assert len(table) > 10
    assert {each["rank"] for each in step.operators(limit=1).about["tables"]} == {0, 1}
    earliest = step.non_finite().about["earliest"]
    assert (earliest["rank"], earliest["operator"]) == (1, "linear")
    assert earliest["parent"] == "Module.blocks.1.down.Linear.forward.0"
    apart = session.divergence(
        {"run": "dumped", "step": 5, "rank": 0}, {"run": "dumped", "step": 5, "rank": 1}
    )
    assert apart["first"] is not None
    same = session.divergence(
        {"run": "dumped", "step": 3, "rank": 0}, {"run": "dumped", "step": 5, "rank": 0}
    )
    assert same["first"] is None
    # Nothing is written beside what was handed over.
    assert {path: path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))} == before


def test_the_command_line_reports_the_import_and_what_cannot_be_read(
    running: Service, directory: Path, tmp_path: Path
) -> None:
    shutil.copytree(directory / "step3" / "rank0", tmp_path / "step0" / "proc4711")
    lay(tmp_path, "no dump", "step0/proc4712")
    env = running.environment("operate")
    result = invoke("import", str(tmp_path), "--run", "alone", env=env)
    assert result.exit_code == 1, result.output
    told = " ".join(result.stdout.split())
    assert "the operators of 1 dump of 2 processes" in told
    assert "not imported:" in told
    assert "proc4712" in told
    tables = running.get("/steps/0/operators", run="alone", limit=1)["tables"]
    assert sorted(each["state"] for each in tables) == ["digested", "refused"]


def test_no_dump_replaces_another(
    session: stagescope.Session, directory: Path, tmp_path: Path
) -> None:
    folders = {
        "old_log_prob/step0/rank0": "old",
        "actor_train/step0/rank0": "train",
        "generate_sequence/41/step0/rank0": "one",
        "generate_sequence/42/step0/rank0": "other",
        "generate_sequence_41/step0/rank0": "alike as a name of a directory",
        "step0/proc9": "no rank",
    }
    for folder, name in folders.items():
        shutil.copytree(directory / "step3" / "rank0", tmp_path / folder)
        dump = tmp_path / folder / "dump.json"
        dump.write_text(dump.read_text().replace(".linear.0.", f".{name}.0."))
    report = import_dump(session, open_dump(tmp_path), "stages")
    assert (report["operators"], report["problems"], report["refused"]) == (6, [], [])
    assert any("proc9 names no rank" in note for note in report["notes"])
    step = session.step(0, run="stages")
    found = {
        stage: [
            name
            for name in folders.values()
            if len(step.operators(stage=stage, name=f"*.{name}.0.forward"))
        ]
        for stage in {each["stage"] for each in step.operators(limit=1).about["tables"]}
    }
    assert found == {
        "old_log_prob": ["old"],
        "actor_train": ["train"],
        "generate_sequence/41": ["one"],
        "generate_sequence/42": ["other"],
        "generate_sequence_41": ["alike as a name of a directory"],
        "actor_update": ["no rank"],
    }
    # The same again, once it is no longer the newest attempt.
    newer = import_dump(session, open_dump(tmp_path / "actor_train"), "stages", new_attempt=True)
    assert newer["operators"] == 1
    again = import_dump(session, open_dump(tmp_path), "stages")
    assert (again["nothing_new"], again["operators"]) == (True, 6)


def test_operators_beside_kept_tensors(
    session: stagescope.Session, directory: Path, tmp_path: Path
) -> None:
    attempt = own_directory(tmp_path)
    rank = attempt / "step_0/actor_update/step0/rank0"
    rank.mkdir(parents=True)
    for name in FILES:
        shutil.copy(directory / "step3/rank0" / name, rank / name)
    dump = open_dump(attempt)
    assert dump.kind == "own"
    assert import_dump(session, dump, "both")["operators"] == 1
    assert len(session.step(0, run="both").operators()) > 10


def test_an_empty_last_step_is_said_to_be_empty(
    session: stagescope.Session, directory: Path, tmp_path: Path
) -> None:
    """As engines leave it: the collection opens one step more (vllm-ascend 12455)."""
    shutil.copytree(directory / "step3/rank0", tmp_path / "step1/rank0")
    shutil.copytree(directory / "step3/rank0", tmp_path / "step2/rank0")
    (tmp_path / "step2/rank0/dump.json").write_text('{"task": "statistics", "data": {}}')
    report = import_dump(session, open_dump(tmp_path), "trailing")
    assert (report["operators"], report["problems"], report["refused"]) == (2, [], [])
    (note,) = report["notes"]
    assert note == "step 2, actor_update, actor 0: msprobe recorded no call"
    assert session.step("captured", run="trailing").step == 1
    steps = {number: session.step(number, run="trailing") for number in (1, 2)}
    states = {number: step.dumps()[0]["state"] for number, step in steps.items()}
    assert states == {1: "complete", 2: "empty"}
    step = steps[2]
    assert "actor_update actor/0 is empty: msprobe recorded no call" in step.operators().lines()
    shown = "\n".join(step.non_finite().lines())
    assert "is empty" in shown
    assert "all finite" not in shown
    both = session.divergence({"run": "trailing", "step": 1}, {"run": "trailing", "step": 2})
    assert "nothing was compared: the two have no call in common" in both.lines()


def test_values_that_a_script_saved(
    session: stagescope.Session, directory: Path, tmp_path: Path
) -> None:
    """Level debug: debug.json alone, or beside the calls."""
    tensor = {**TENSOR, "Max": 2.0, "Min": -2.0}
    saved = {"advantages.0.debug": tensor, "loss.0.debug": {**tensor, "Max": float("nan")}}
    text = json.dumps({"task": "statistics", "level": "debug", "data": saved})
    shutil.copytree(directory / "step3/rank0", tmp_path / "step0/rank1")
    for rank in (0, 1):
        lay(tmp_path, text, f"step0/rank{rank}", "debug.json")
    report = import_dump(session, open_dump(tmp_path), "saved")
    assert (report["operators"], report["refused"], report["notes"]) == (2, [], [])
    step = session.step(0, run="saved")
    for rank in (0, 1):
        assert len(step.operators(rank=rank, direction="debug")) == 2
    assert step.non_finite().about["earliest"]["name"] == "loss.0.debug"


def test_a_structure_has_no_values(session: stagescope.Session, tmp_path: Path) -> None:
    lay(tmp_path, '{"task": "structure", "data": {}}')
    report = import_dump(session, open_dump(tmp_path), "structure")
    note = "step 0, actor_update, actor 0: msprobe recorded the structure alone (task structure)"
    assert report["notes"] == [note]
    step = session.step(0, run="structure")
    assert step.dumps()[0]["state"] == "complete"
    shown = "actor_update actor/0 has the structure alone (task structure): no values"
    assert shown in step.operators().lines()
    assert shown in step.non_finite().lines()


def test_tensors_of_an_import_are_in_its_directory(
    session: stagescope.Session, directory: Path, tmp_path: Path
) -> None:
    for step in (0, 1):
        rank = tmp_path / f"step{step}/rank0"
        shutil.copytree(directory / "step3/rank0", rank)
        text = (rank / "dump.json").read_text()
        (rank / "dump.json").write_text(text.replace('"statistics"', '"tensor"', 1))
    import_dump(session, open_dump(tmp_path), "full")
    with pytest.raises(NotFound, match="stagescope compare DIR DIR"):
        session.tensors({"run": "full", "step": 0}, {"step": 1})


@pytest.mark.parametrize(
    ("run", "known", "unknown", "lines"),
    [
        (
            "in_part",
            {**TENSOR, "Max": 1, "Min": 0},
            {**TENSOR, "Max": None, "Min": None},
            [
                "no operator gave a NaN or an infinity (but for masks), as far as is known: "
                "1 tensor has no Min and Max",
                "actor_update actor/0: finite in the 1 tensor with Min and Max; 1 tensor has no "
                "Min and Max: not known",
            ],
        ),
        (
            "checksums",
            {**TENSOR, "md5": "0x01"},
            {**TENSOR, "md5": "0x01"},
            [
                "nothing is known of NaN and infinities: no Min and Max were recorded",
                "actor_update actor/0: not known, as its 1 calls have no Min and Max",
            ],
        ),
    ],
)
def test_what_is_not_known_is_not_all_finite(
    session: stagescope.Session, tmp_path: Path, run: str, known: object, unknown: object,
    lines: list[str],
) -> None:  # fmt: skip
    data = {"Torch.mul.0.forward": {"input_args": [known], "output": [unknown]}}
    import_dump(session, open_dump(lay(tmp_path, json.dumps({"data": data}))), run)
    assert session.step(0, run=run).non_finite().lines(width=200) == lines


def test_a_dump_that_was_cut_off_is_not_called_empty(
    session: stagescope.Session, directory: Path, tmp_path: Path
) -> None:
    text = (directory / "step3/rank0/dump.json").read_text()
    for rank, part in enumerate((text, "", text[:100], text[: len(text) // 2])):
        lay(tmp_path, part, f"step0/rank{rank}")
    report = import_dump(session, open_dump(tmp_path), "cut")
    assert report["notes"] == []
    assert [Path(each["path"]).parent.name for each in report["problems"]] == [
        "rank1", "rank2", "rank3",
    ]  # fmt: skip
    messages = [each["message"] for each in report["problems"]]
    assert all("was cut off while it was written" in message for message in messages)
    assert ["it holds no complete call" in message for message in messages] == [True, True, False]
    assert "recorded no call" not in "\n".join(session.step(0, run="cut").operators().lines())


def test_the_file_that_was_cut_off_is_named(
    session: stagescope.Session, directory: Path, tmp_path: Path
) -> None:
    rank = tmp_path / "st\udcffage/step0/rank0"
    rank.mkdir(parents=True)
    shutil.copy(directory / "step3/rank0/dump.json", rank)
    tensor = {**TENSOR, "Max": 1, "Min": 0}
    saved = json.dumps({"level": "debug", "data": {"loss.0.debug": tensor, "x.0.debug": tensor}})
    (rank / "debug.json").write_text(saved[:-30])
    (problem,) = import_dump(session, open_dump(tmp_path), "cut-off")["problems"]
    assert Path(problem["path"]).name == "debug.json"
    assert "debug.json was cut off while it was written, at byte" in problem["message"]
