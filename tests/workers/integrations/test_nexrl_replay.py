"""NexRL's mock rollout worker replays a dump by (group_id, run_id), and says what is missing."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.support.trainers import nexrl_fakes

from stagescope_workers.integrations import registry
from stagescope_workers.integrations.nexrl.replay import ReplayError
from stagescope_workers.integrations.nexrl.rows import Trajectory


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(nexrl_fakes.write(tmp_path / "fake")))
    found = registry.integration("nexrl")
    assert found is not None
    installed = registry.install(found.package, found.module)
    yield importlib.import_module("nexrl.mock.mock_rollout_worker")
    sys.meta_path.remove(installed)
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "nexrl":
            del sys.modules[name]


class Pool:
    """A trajectory pool that gives its answers in turn."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.taken: list[Any] = []

    def put_trajectory(self, trajectory: Trajectory) -> str:
        answer = self.answers.pop(0) if self.answers else "success"
        if answer == "success":
            self.taken.append(trajectory)
        return answer


def row(group: str, run: int | None, first: int = 1, **changes: object) -> dict[str, object]:
    extra = {"group_id": group, "task_id": 0, **({} if run is None else {"run_id": run})}
    return {
        "tokens": [first, 2, 3], "loss_mask": [0, 1, 1], "reward": 1.0, "is_val": False,
        "extra_fields": extra, **changes,
    }  # fmt: skip


def dump(path: Path, *rows: dict[str, Any], step: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"step": step, "num_trajectories": len(rows), "trajectories": list(rows)}
    if path.suffix == ".pt":
        torch.save(data, path)
    else:
        path.write_text(json.dumps(data) + "\n")
    return path


def worker(module: ModuleType, path: Path, pool: Pool | None = None, **config: object) -> Any:
    made = module.MockRolloutWorker(
        {
            "trajectory_load_path": str(path),
            "trajectory_format": "pt",
            "max_sequence_length": 8,
            **config,
        }
    )
    made.pool = pool or Pool()
    return made


def task(group: str, run: int) -> dict[str, object]:
    return {"group_id": group, "run_id": run, "prompt": "p"}


@pytest.mark.parametrize("suffix", ["pt", "jsonl"])
def test_each_task_gets_its_own_in_any_order(
    module: ModuleType, tmp_path: Path, suffix: str
) -> None:
    rows = [row(f"g{group}", run, 10 * group + run) for group in (1, 2) for run in (0, 1)]
    path = dump(tmp_path / f"step_000000.{suffix}", *rows)
    pool = Pool()
    replaying = worker(module, path, pool, trajectory_format=suffix)
    order = [("g2", 1), ("g1", 0), ("g2", 0), ("g1", 1)]
    assert [replaying.rollout(task(*key)) for key in order] == ["success"] * 4
    assert [one.tokens[0] for one in pool.taken] == [21, 10, 20, 11]
    # The trainer pads them in place: the next pass over the data must not see that.
    pool.taken[0].tokens.append(99)
    replaying.rollout(task("g2", 1))
    assert pool.taken[-1].tokens == [21, 2, 3]


def test_a_task_comes_again_while_weights_are_in_sync(module: ModuleType, tmp_path: Path) -> None:
    """An agent's task has several trajectories: none of them goes to the pool twice."""
    path = dump(tmp_path / "step_000000.pt", row("g", 0, 1), row("g", 0, 2), row("g", 0, 3))
    pool = Pool("success", "re-rollout", "re-rollout")
    replaying = worker(module, path, pool)
    assert [replaying.rollout(task("g", 0)) for _ in range(3)] == [
        "re-rollout", "re-rollout", "success",
    ]  # fmt: skip
    assert [one.tokens[0] for one in pool.taken] == [1, 2, 3]


def test_a_directory_has_a_file_for_each_step(module: ModuleType, tmp_path: Path) -> None:
    for step in (10, 2):
        dump(tmp_path / "d" / f"step_{step:06d}.pt", row("g", 0, step), step=step)
    pool = Pool()
    replaying = worker(module, tmp_path / "d", pool)
    replaying.rollout(task("g", 0))
    replaying.rollout(task("g", 0))
    assert [one.tokens[0] for one in pool.taken] == [2, 10]
    with pytest.raises(ReplayError, match="asked for once more"):
        replaying.rollout(task("g", 0))
    with pytest.raises(ReplayError, match="num_workers to 1"):
        worker(module, tmp_path / "d", resource={"num_workers": 2})


def test_what_is_missing_ends_the_replay(module: ModuleType, tmp_path: Path) -> None:
    path = dump(tmp_path / "step_000000.pt", row("g", 0))
    replaying = worker(module, path)
    with pytest.raises(ReplayError, match=r"no trajectory of the task \('g', 1\)"):
        replaying.rollout(task("g", 1))
    with pytest.raises(ReplayError, match="no group_id and run_id"):
        replaying.rollout({"prompt": "p"})
    replaying._is_running_validate = True
    with pytest.raises(ReplayError, match="validate_before_train"):
        replaying.rollout(task("g", 0))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no trajectories"),
        ([row("g", None)], "1 lack run_id"),
        ([row("", 0), row("", 1)], "2 lack group_id"),
        ([row("g", 0, tokens=None)], "lack tokens"),
        ([row("g", 0, loss_mask=[1])], "not as long"),
        ([row("g", 0, is_val=True)], "of a validation alone"),
    ],
)
def test_a_dump_that_cannot_be_replayed_is_refused(
    module: ModuleType, tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ReplayError, match=message):
        worker(module, dump(tmp_path / "step_000000.pt", *rows))


def test_a_path_or_format_that_is_wrong_is_refused(module: ModuleType, tmp_path: Path) -> None:
    """NexRL itself would train on synthetic trajectories, and say so in a line of its log."""
    with pytest.raises(ReplayError, match="does not exist here"):
        worker(module, tmp_path / "none.pt")
    path = dump(tmp_path / "step_000000.pt", row("g", 0))
    with pytest.raises(ReplayError, match="trajectory_format 'jsonl'"):
        worker(module, path, trajectory_format="jsonl")
    with pytest.raises(ReplayError, match="expected pt or jsonl"):
        worker(module, path, trajectory_format="csv")
    with pytest.raises(ReplayError, match=r"no step_N\.pt"):
        worker(module, tmp_path / "fake")


def test_a_mock_worker_without_a_path_stays_nexrls(module: ModuleType) -> None:
    plain = module.MockRolloutWorker({"max_sequence_length": 8})
    assert plain.rollout({"prompt": "p"}) == "synthetic"
