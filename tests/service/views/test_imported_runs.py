"""Directories that become runs: which run and attempt they make, and what compares afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke
from tests.support.dump_files import (
    make_batch,
    nexrl_directory,
    slime_rollout_file,
    slime_train_file,
)
from tests.support.step_dumps import WholeStep

import stagescope
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.importing import import_key
from stagescope_wire.keep import SECTIONS
from stagescope_wire.names import normal_run_name

WHOLE = WholeStep([9, 2, 4, 3])
PAYLOAD: dict[str, object] = {
    "schema": 1,
    "tensors": WHOLE.piece([0, 1]),
    "strings": {"sample_ids": WHOLE.ids([0, 1])["samples"]},
    "meta": {},
}


def train(running: Service, run: str, *, loss: float = 0.1) -> Path:
    """Two ranks that log losses in an update; return what is kept of them."""
    for number in range(2):
        rank = Rank(running, run=run, rank=number)
        rank.stage("actor_compute_log_prob", 1, PAYLOAD)
        for micro in range(2):
            rank.begin("actor_update", 1, microbatch=micro)
            value = loss if (number, micro) == (0, 1) else 0.5 * micro
            rank.end("actor_update", 1, PAYLOAD, microbatch=micro, scalars={"loss": value})
    return running.settings.data_path / run / "a1"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as made:
        made.use_ring()
        made.engine.keep(*SECTIONS)
        yield made


@pytest.fixture
def session(running: Service) -> Iterator[stagescope.Session]:
    with running.session() as found:
        yield found


@pytest.fixture(scope="module")
def trained(running: Service) -> Path:
    return train(running, "trained")


@pytest.fixture
def export(trained: Path, tmp_path: Path) -> Path:
    result = invoke("export", str(trained), str(tmp_path / "export"))
    assert result.exit_code == 0, result.output
    return tmp_path / "export"


def take_in(running: Service, *words: str, exit_code: int = 0) -> str:
    """Run `stagescope import`; return what it prints, on one line."""
    env = running.environment("operate")
    result = invoke("import", *words, env=env)
    assert result.exit_code == exit_code, result.stderr
    return " ".join((result.stderr if exit_code else result.stdout).split())


def with_loss(directory: Path, value: float) -> None:
    """Write another loss of actor rank 0's second microbatch into an export."""
    path = directory / "loss" / "step_000001_rank0_micro1.pt"
    data = torch.load(path, weights_only=True)
    assert data["loss"] == 0.1
    torch.save({**data, "loss": value}, path)


@pytest.mark.parametrize("value", [99.0, float("nan")])
def test_another_loss_in_an_export_is_a_difference(
    running: Service, session: stagescope.Session, export: Path, tmp_path: Path, value: float
) -> None:
    other = shutil.copytree(export, tmp_path / "other")
    with_loss(other, value)
    one, two = f"export-{value}", f"other-{value}"
    take_in(running, str(export), "--run", one)
    take_in(running, str(other), "--run", two)
    for a, b in ((one, two), ("trained@1", two)):
        found = session.compare(a, b)
        assert (found.verdict, found.exit_status) == ("different", 1)
        assert found.first is not None
        assert (found.first["section"], found.first["name"]) == ("loss", "loss")
        location = found.first["location"]["b"]["place"]
        assert (location["stage"], location["role"], location["rank"]) == (
            "actor_update",
            "actor",
            0,
        )
        assert location["microbatch"] == 1
    assert session.compare("trained@1", one).exit_status == 0


def test_what_nexrl_dumps_of_no_step_is_left_out(
    running: Service, session: stagescope.Session, export: Path
) -> None:
    """NexRL tells `compute_log_prob` no step: what its forward passes dump is of step -1."""
    loss = export / "loss"
    shutil.copy(loss / "step_000001_rank0_micro1.pt", loss / "step_-00001_rank0_micro0.pt")
    told = take_in(running, str(export), "--run", "no-step")
    assert "left out: loss/step_-00001_rank0_micro0.pt: of step -1, which is none" in told
    assert [step["step"] for step in session.steps("no-step")] == [1]
    assert "nothing new" in take_in(running, str(export), "--run", "no-step")


def test_what_of_a_file_was_not_read_or_is_not_trained_is_said(
    running: Service, tmp_path: Path
) -> None:
    batch = make_batch(8, 24)
    slime_rollout_file(tmp_path / "rollout_4.pt", batch, rollout_id=4)
    train = slime_train_file(tmp_path / "train_4.pt", batch, rollout_id=4)
    assert "note" not in take_in(running, str(tmp_path), "--run", "slime-whole")
    data = torch.load(train, weights_only=True)
    torch.save({**data, "samples": data["samples"][4:]}, train)
    told = take_in(running, str(tmp_path), "--run", "slime-half")
    assert (
        "note: step 4: 4 of 8 samples of the rollout are in no file of the training (0, 1," in told
    )
    rows = [{"input": "a", "output": "b", "score": "1", "acc": 1}, {"input": "a", "output": "c"}]
    text = "\n".join(map(json.dumps, rows)) + '\n{"input": "cut'
    verl = tmp_path / "verl"
    verl.mkdir()
    (verl / "1.jsonl").write_text(text)
    env = running.environment("operate")
    result = invoke("import", str(verl), "--run", "verl-cut", env=env)
    assert result.exit_code == 1
    told = " ".join(result.stdout.split())
    assert "verl-cut: 1 payload of 1 process" in told
    assert "1.jsonl: line 3 is no JSON" in told
    assert "the other 2 were read" in told
    assert "missing: rewards of 1 row, acc of 1 row" in told
    assert "note: rewards: texts in the files, read as numbers" in told


def test_files_without_a_step_are_for_comparison_alone(running: Service, tmp_path: Path) -> None:
    names = ("input_ids", "loss_mask", "versions")
    batch = {name: torch.ones(2, 3, dtype=torch.int64) for name in names}
    torch.save({**batch, "logprobs": torch.zeros(2, 3)}, tmp_path / "batch_data.pt")
    told = take_in(running, str(tmp_path), "--run", "areal/batch")
    shown = {row["run"]: row["display_name"] for row in running.get("/runs", limit=500)["rows"]}
    assert shown[normal_run_name("areal/batch")] == "areal/batch"
    assert "Its files name no step" in told
    assert f"try stagescope compare {tmp_path} ANOTHER" in told


def test_another_loss_in_a_step_without_tensors_is_a_difference(
    running: Service, session: stagescope.Session, export: Path, tmp_path: Path
) -> None:
    for run, value, is_whole in (("some", 0.5, True), ("some-else", 0.75, True),
                                 ("losses", 0.5, False), ("losses-else", 0.75, False)):  # fmt: skip
        directory = tmp_path / run
        shutil.copytree(export / ("" if is_whole else "loss"),
                        directory / ("" if is_whole else "loss"))  # fmt: skip
        data = {"step": 2, "rank": 0, "micro_idx": 0, "loss": value}
        torch.save(data, directory / "loss" / "step_000002_rank0_micro0.pt")
        take_in(running, str(directory), "--run", run)
    for a, b in (("some", "some-else"), ("losses", "losses-else"), ("losses:2", "some-else:2")):
        found = session.compare(a, b)
        assert (found.verdict, found.exit_status) == ("different", 1)
        assert found.first is not None
        assert found.first["location"]["a"]["place"]["step"] == 2
    for a, b in (("some:2", "losses:2"), ("some", "losses"), ("trained", "losses")):
        assert session.compare(a, b).exit_status == 0


def test_another_loss_in_kept_files_is_a_difference(
    running: Service, session: stagescope.Session, trained: Path
) -> None:
    other = train(running, "other-trained", loss=99.0)
    take_in(running, str(trained), "--run", "own")
    take_in(running, str(other), "--run", "own-other")
    found = session.compare("own", "own-other")
    assert (found.verdict, found.exit_status) == ("different", 1)
    assert found.first is not None
    assert found.first["name"] == "loss"
    assert session.compare("trained", "own").verdict == "same"


def test_a_directory_becomes_a_run_under_each_name(
    running: Service, session: stagescope.Session, export: Path
) -> None:
    for run in ("first", "second"):
        assert take_in(running, str(export), "--run", run).startswith(f"{run}: 1 payload of")
        assert [row["state"] for row in session.attempts(run)] == ["ended"]
        assert len(session.step(1, run=run).scalars()) == 4
    assert session.compare("first", "second").exit_status == 0


def test_what_is_there_already_is_nothing_new(
    running: Service, session: stagescope.Session, export: Path
) -> None:
    take_in(running, str(export), "--run", "twice")
    before = list(session.step(1, run="twice").stages())
    again = take_in(running, str(export), "--run", "twice")
    assert again.startswith("nothing new: already in run twice: 1 payload of")
    assert json.loads(take_in(running, str(export), "--run", "twice", "--json"))["nothing_new"]
    assert list(session.step(1, run="twice").stages()) == before
    assert len(session.attempts("twice")) == 1


def test_an_interrupted_import_continues(
    running: Service, session: stagescope.Session, export: Path
) -> None:
    key = import_key(open_dump(export), "broken-off")
    Rank(running, run="broken-off", key=key, incarnation=f"{key}-actor-0")
    assert take_in(running, str(export), "--run", "broken-off").startswith("broken-off: 1 payload")
    assert len(session.attempts("broken-off")) == 1
    assert len(session.step(1, run="broken-off").scalars()) == 4


def test_a_directory_that_grew_is_the_next_attempt_of_its_run(
    running: Service, session: stagescope.Session, export: Path
) -> None:
    take_in(running, str(export), "--run", "grows")
    with_loss(export, 98.0)
    assert "nothing new" not in take_in(running, str(export), "--run", "grows")
    assert sorted(row["attempt"] for row in session.attempts("grows")) == [1, 2]
    scalars = session.step(1, run="grows").scalars()
    assert 98.0 in scalars["value"]


def test_another_run_is_not_changed_unless_requested(
    running: Service, session: stagescope.Session, export: Path, tmp_path: Path
) -> None:
    train(running, "live")
    other = shutil.copytree(export, tmp_path / "other")
    take_in(running, str(export), "--run", "taken")
    for run, made in (("live", "is a training that reported"), ("taken", "was imported from")):
        output = take_in(running, str(other), "--run", run, exit_code=1)
        assert f"run {run!r} exists: its attempt 1 {made}" in output
        assert "--new-attempt" in output
        assert [row["attempt"] for row in session.attempts(run)] == [1]
        take_in(running, str(other), "--run", run, "--new-attempt")
        assert sorted(row["attempt"] for row in session.attempts(run)) == [1, 2]
        assert "nothing new" in take_in(running, str(other), "--run", run)


def test_parts_of_a_nexrl_directory_are_its_ranks_and_whole_batches_are_no_ranks(
    running: Service, session: stagescope.Session, tmp_path: Path
) -> None:
    take_in(running, str(nexrl_directory(tmp_path / "dumps")), "--run", "from-nexrl")
    rows = list(session.step(0, run="from-nexrl").stages())
    assert {row["status"] for row in rows} == {"ok"}
    updates = {(row["role"], row["rank"], row["part"])
               for row in rows if row["stage"] == "actor_update"}  # fmt: skip
    assert updates >= {("actor", rank, f"0.0.0.{micro}") for rank in (0, 1) for micro in (0, 1)}
    assert [row["role"] for row in rows if row["stage"] == "actor_compute_log_prob"] == ["driver"]
