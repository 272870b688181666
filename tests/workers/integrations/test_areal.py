"""AReaL's hooks: what a rank hands over is of the right tokens, in each mode of its loss."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from tests.support.api import Service
from tests.support.engines.tiny_llama import tiny_tokenizer
from tests.support.routes import marked, passes_of
from tests.support.trainers import contracts
from tests.workers.integrations.conftest import Attach
from tests.workers.integrations.fakes import areal_modules

from stagescope_wire.canary import FIXED, Canary
from stagescope_workers.canary.sequences import SCORED, of_tokenizer
from stagescope_workers.integrations import areal, registry
from stagescope_workers.integrations.areal import ranks, rows
from stagescope_workers.integrations.areal import trainer as trainer_side
from stagescope_workers.integrations.canary import VARIABLE
from stagescope_workers.integrations.patches import Patches
from stagescope_workers.probe.probe import Probe

ROWS: Final = 4
WIDTH: Final = 9
LENGTHS: Final = (9, 7, 8, 6)


@dataclasses.dataclass
class Config:
    """The names of AReaL's configuration that the integration reads."""

    use_decoupled_loss: bool = False
    recompute_logprob: bool = False
    prox_logp_method: str = "recompute"
    optimizer: object = "adam"
    temperature: float = 1.0
    experiment_name: str = "gsm8k"
    trial_name: str = "t0"
    first_step: int = 0
    total_train_steps: int = 2
    api_key: str = "hidden"


def rollout(step: int, *, turns: bool = True) -> list[dict[str, torch.Tensor]]:
    """One trajectory a row: a prompt, two turns of the model round a turn of the environment."""
    generator = torch.Generator().manual_seed(step)
    batch = []
    for row, length in enumerate(LENGTHS):
        ids = torch.randint(3, 90, (1, WIDTH), generator=generator, dtype=torch.int32)
        mask = torch.zeros(1, WIDTH, dtype=torch.int32)
        mask[0, 2:4] = 1
        mask[0, 5:length] = 1
        attention = torch.zeros(1, WIDTH, dtype=torch.bool)
        attention[0, :length] = True
        noise = 0.03 * torch.randn(1, WIDTH, generator=generator)
        turn = torch.full((1, WIDTH), -1)
        turn[0, 2:4], turn[0, 5:length] = 1, 3
        # A version for each token: the first turn may be of older weights.
        versions = torch.where(mask.bool(), step, -1).int()
        versions[0, 2:4] = max(0, step - 1)
        each = {
            "input_ids": ids, "loss_mask": mask, "attention_mask": attention,
            "logprobs": (-0.1 - 0.01 * ids + noise) * mask,
            "versions": versions, "rewards": torch.tensor([float(row % 2)]),
        }  # fmt: skip
        batch.append({**each, "turn_ids": turn} if turns else each)
    return batch


@pytest.fixture
def fake(attach_fake: Attach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """The fake package, imported under the hook; runs have the test's name."""
    areal_modules.write(tmp_path)
    monkeypatch.setattr(trainer_side, "_current", None)
    with attach_fake("areal"):
        installed = registry.install("areal", areal.__name__)
        yield installed
        sys.meta_path.remove(installed)


@dataclasses.dataclass
class Trained:
    """What AReaL's fake itself had."""

    run: str
    engine: object
    log: list[tuple[int, dict[str, float]]]
    batches: dict[int, list[dict[str, torch.Tensor]]]

    def expected(self, step: int, drift: list[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """p, q and the token's turn of the model's tokens, by plain numpy.

        Args:
            step: The step.
            drift: How far the weights had moved for each row.
        """
        p, q, turns = [], [], []
        for row, each in enumerate(self.batches[step]):
            ids = each["input_ids"][0].numpy()
            mask = each["loss_mask"][0].numpy().astype(bool)
            p.append(
                (
                    np.float32(-0.1)
                    - np.float32(0.01) * ids.astype(np.float32)
                    + np.float32(drift[row])
                )[mask]
            )
            q.append(each["logprobs"][0].numpy()[mask])
            turns.append(each["turn_ids"][0].numpy()[mask])
        return (
            np.concatenate(p).astype(np.float64),
            np.concatenate(q).astype(np.float64),
            np.concatenate(turns),
        )


def train(
    monkeypatch: pytest.MonkeyPatch,
    *,
    v2: bool = False,
    prepare: Callable[[Any, Any], None] = lambda trainer, engine: None,
    **options: Any,
) -> Trained:
    import os

    modules = {
        name: importlib.import_module(f"areal.{name}")
        for name in ("engine.fsdp_engine", "trainer.ppo.actor", "trainer.rl_trainer")
    }
    config = Config(**options)
    engine = modules["engine.fsdp_engine"].FSDPEngine()
    engine.set_version(config.first_step)
    actor = modules["trainer.ppo.actor"]
    inner = actor.PPOActor(config, engine)
    trainer = modules["trainer.rl_trainer"].PPOTrainer(config)
    trainer.actor = (actor.PPOActorControllerV2 if v2 else actor.PPOActorController)(inner)
    batches: dict[int, list[dict[str, torch.Tensor]]] = {}

    def workflow(step: int) -> list[dict[str, torch.Tensor]]:
        batches[step] = [{n: v.clone() for n, v in each.items()} for each in rollout(step)]
        return rollout(step)

    prepare(trainer, engine)
    trainer.train(workflow=workflow)
    return Trained(os.environ["STAGESCOPE_RUN"], engine, trainer.stats_logger.logged, batches)


def check(live: Service, run: str, step: int, stage: str, p: np.ndarray, q: np.ndarray) -> object:
    """Compare the service's numbers of a step with those of plain numpy."""
    answer = live.get(f"/steps/{step}/metrics", run=run)
    metrics = answer["metrics"]
    assert (answer["stage"], answer["complete"]) == (stage, "complete")
    assert answer["coverage"]["tokens"] == len(p)
    assert metrics["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9, abs=1e-15)
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(
        np.abs(np.exp(p) - np.exp(q)).max(), rel=1e-9
    )
    return answer


@pytest.mark.parametrize("v2", [False, True])
def test_the_default_compares_the_updates_passes_with_the_engine(
    live: Service, fake: Patches, monkeypatch: pytest.MonkeyPatch, v2: bool
) -> None:
    """AReaL's own prox_logp is a copy of the engine's there: it must not be the trainer's."""
    had = train(monkeypatch, v2=v2)
    for step in (0, 1):
        first = 0.25 * step  # each of a step's two optimizer steps moves the weights by 0.125
        p, q, turns = had.expected(step, [first, first, first + 0.125, first + 0.125])
        check(live, had.run, step, "actor_update", p, q)
        rounds = live.get(f"/steps/{step}/rounds", run=had.run, by="turn")["rows"]
        found = {row["turn"]: row["tokens"] for row in rounds}
        assert found == {1: int((turns == 1).sum()), 3: int((turns == 3).sum())}
    stages = live.get("/steps/1/stages", run=had.run)["rows"]
    assert {(row["role"], row["stage"]) for row in stages} == {
        ("driver", "rollout_generate"), ("driver", "compute_advantage"),
        ("driver", "actor_update"), ("driver", "weight_sync"), ("actor", "compute_advantage"),
        ("actor", "actor_update"), ("actor", "weight_sync"),
    }  # fmt: skip
    staleness = live.get("/steps/1/rounds", run=had.run, by="staleness")["rows"]
    assert {row["staleness"]: row["tokens"] for row in staleness} == {
        0: int((had.expected(1, [0] * ROWS)[2] == 3).sum()),
        1: int((had.expected(1, [0] * ROWS)[2] == 1).sum()),
    }
    scalars = live.get("/steps/1/scalars", run=had.run)["rows"]
    assert {row["name"]: row["value"] for row in scalars if row["stage"] is None} == {
        "ppo_actor/task_reward/avg": 1.5
    }
    # AReaL's own statistics go where they went.
    own = [(s, {n: v for n, v in d.items() if n[:10] != "stagescope"}) for s, d in had.log]
    assert own == [(s, {"ppo_actor/task_reward/avg": s + 0.5, "n__count": 7}) for s in (0, 1)]


@pytest.mark.parametrize(
    "options", [{"recompute_logprob": True}, {"use_decoupled_loss": True}], ids=["ppo", "decoupled"]
)
def test_a_pass_before_the_update_is_read_before_it_overwrites_the_engines(
    live: Service, fake: Patches, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    had = train(monkeypatch, **options)
    for step in (0, 1):
        p, q, _ = had.expected(step, [0.25 * step] * ROWS)
        check(live, had.run, step, "actor_compute_log_prob", p, q)


@pytest.mark.parametrize("experts", [2, None])
@pytest.mark.parametrize(
    "options", [{"recompute_logprob": True}, {}], ids=["before the update", "of its loss"]
)
def test_the_routes_of_the_engine_are_those_of_its_passes(
    fake: Patches,
    monkeypatch: pytest.MonkeyPatch,
    with_routes: list[dict[str, Any]],
    options: dict[str, Any],
    experts: int | None,
) -> None:
    """AReaL has layers and experts in one dimension; a replaying pass takes them out."""
    plain = rollout

    def with_experts(step: int) -> list[dict[str, torch.Tensor]]:
        routes = torch.tensor(np.stack(marked([WIDTH] * ROWS))).flatten(2)
        return [
            {**each, "routed_experts": routes[row : row + 1]}
            for row, each in enumerate(plain(step))
        ]

    def prepare(trainer: Any, engine: Any) -> None:
        engine.model_config = SimpleNamespace(**{"num_experts_per_tok": experts} if experts else {})

    monkeypatch.setitem(globals(), "rollout", with_experts)
    train(monkeypatch, prepare=prepare, total_train_steps=1, **options)
    if experts is None:
        assert "an unknown number of experts" in with_routes[0]["routes_refused"]
        return
    parts = [0] if options else [0, 2]  # first row of each mini-batch
    assert len(with_routes) == len(parts)
    for first, recorded in zip(parts, with_routes, strict=True):
        tokens = [*passes_of(recorded)]
        assert len({row for row, *_ in tokens}) == ROWS // len(parts)
        for row, column, of_row, token in tokens:
            assert (of_row, token) == (row + first, column - 1)


@pytest.mark.parametrize("method", ["loglinear", "reuse_train_logp"])
def test_decoupled_without_a_pass_of_its_own(
    live: Service, fake: Patches, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    had = train(monkeypatch, use_decoupled_loss=True, prox_logp_method=method)
    p, q, _ = had.expected(1, [0.25, 0.25, 0.375, 0.375])
    check(live, had.run, 1, "actor_update", p, q)


def test_a_restart_says_where_it_resumed(
    live: Service, fake: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    had = train(monkeypatch, first_step=5, total_train_steps=7)
    attempts = live.get(f"/runs/{had.run}/attempts")["rows"]
    assert [row["resumed_from_step"] for row in attempts] == [4]


def test_the_fakes_are_as_recorded(fake: Patches) -> None:
    def find(module: str, path: str) -> object:
        return contracts.at_path(importlib.import_module(module), path)

    assert contracts.fakes_differ("areal", find) == []
    assert not [str(patch) for patch in fake if patch.is_missing]


def test_nothing_of_ours_reaches_the_training(
    fake: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bit that fails is skipped: the training runs and gets what it got."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("ours")

    for name in ("before_update", "after_advantages", "count_rows", "of_tokens"):
        monkeypatch.setattr(rows, name, fail)
    monkeypatch.setattr(trainer_side, "settings", fail)
    had = train(monkeypatch, recompute_logprob=True)
    assert len(had.log) == 2


def test_a_column_of_the_next_token_is_moved_within_its_row() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    assert rows.of_tokens(values, ends).tolist() == [0.0, 1.0, 0.0, 3.0, 4.0]
    assert rows.of_tokens(values[None]).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0]]
    assert rows.of_tokens(values, torch.tensor([0, 0, 5, 5])).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_micro_batch_whose_rows_cannot_be_told_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be told"):
        rows.of_loss({}, {"response_mask": torch.ones(3, dtype=torch.bool)})


class Report(NamedTuple):
    canary: Canary
    version: int
    step: int | None
    role: str


class Synced:
    """What a training with a canary did, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **of_engine: object) -> None:
        self.reports: list[Report] = []
        self.passes: list[tuple[int, float, int, torch.Tensor, torch.Tensor]] = []
        self.order: list[str] = []
        self._of_engine = of_engine
        monkeypatch.setenv(VARIABLE, "1")

        def report(probe: Probe, found: Canary, version: int, step: int | None) -> None:
            self.order.append(found.side)
            self.reports.append(Report(found, version, step, probe.role))

        monkeypatch.setattr(Probe, "report_canary", report)

    def prepare(self, trainer: Any, engine: Any) -> None:
        """Give the fakes what a canary needs, and note each pass and each sync."""
        config = trainer.config
        config.mb_spec = SimpleNamespace(
            n_mbs=1, granularity=2, n_mbs_divisor=1, max_tokens_per_mb=300
        )
        config.actor, config.gconfig = config, SimpleNamespace(temperature=0.5)
        engine.config, engine.tokenizer = config, tiny_tokenizer()
        vars(engine).update(self._of_engine)
        trainer.tokenizer = tiny_tokenizer()
        trainer.rollout = SimpleNamespace(server_infos=[SimpleNamespace(host="127.0.0.1", port=9)])
        forward, update = engine.forward, engine.update_weights

        def run(input_: Any, aggregate_fn: Any = None) -> torch.Tensor:
            spec, mask = engine.config.mb_spec, input_["attention_mask"]
            self.passes.append(
                (engine.get_version(), engine.config.temperature, spec.n_mbs, mask.sum(1), mask)
            )
            assert (spec.granularity, config.mb_spec.granularity) == (1, 2)
            result: torch.Tensor = forward(input_, aggregate_fn)
            return result

        def sync() -> None:
            update()
            self.order.append("sync")

        engine.forward, engine.update_weights = run, sync


@pytest.mark.parametrize("stages", [1, 4])
def test_ranks_score_before_the_sync_and_servers_are_asked_after(
    fake: Patches, monkeypatch: pytest.MonkeyPatch, stages: int
) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    synced = Synced(monkeypatch, parallel_strategy=parallel)
    had = train(monkeypatch, prepare=synced.prepare, total_train_steps=1, temperature=0.5)
    trainer, engine = synced.reports
    assert synced.order == ["trainer", "sync", "engine"]
    assert (trainer.version, trainer.step, trainer.role) == (1, 0, "actor")
    assert (engine.version, engine.step, engine.role) == (1, 0, "driver")
    assert "cannot be reached" in engine.canary.problem
    expected = of_tokenizer(tiny_tokenizer(), max_length=300).rows
    arm = trainer.canary.arms[FIXED]
    assert arm.rows == expected
    for row, values in zip(expected, arm.log_probs, strict=True):
        own = [-0.1 - 0.01 * token + 0.25 for token in row[1:]]  # after two optimizer steps
        assert values == pytest.approx(own[-SCORED:], abs=1e-6)
    [(version, temperature, parts, lengths, _)] = synced.passes
    assert (version, temperature) == (0, 1.0)
    assert parts == len(lengths) == (len(expected) if stages == 1 else 8)  # of 7 sequences
    assert had.engine.config.temperature == 0.5  # type: ignore[attr-defined]


def test_an_adapter_has_the_name_of_its_version_and_servers_need_no_controller(
    fake: Patches, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, asked = Synced(monkeypatch), list[object]()

    def prepare(trainer: Any, engine: Any) -> None:
        synced.prepare(trainer, engine)
        trainer.config.use_lora, trainer.config.gconfig.lora_name = True, "policy"
        trainer.rollout = SimpleNamespace(_engine=SimpleNamespace(addresses=["127.0.0.1:9"]))

    from stagescope_workers.canary.after_syncs import WeightCanary

    def after_sync(self: object, *version: int | None, adapter: str | None = None) -> None:
        asked.append((*version, adapter))

    monkeypatch.setattr(WeightCanary, "after_sync", after_sync)
    train(monkeypatch, prepare=prepare)
    assert asked == [(1, 0, "policy-v1"), (2, 1, "policy-v2")]


@pytest.mark.parametrize("can", [True, False])
def test_no_rank_scores_unless_all_of_them_can(
    fake: Patches, monkeypatch: pytest.MonkeyPatch, can: bool
) -> None:
    votes: list[int] = []

    def all_reduce(vote: torch.Tensor, operation: object, group: str) -> None:
        assert (operation, group) == (torch.distributed.ReduceOp.MIN, "gloo")
        votes.append(int(vote))
        vote.fill_(0)  # another rank's

    if not can:
        monkeypatch.setattr("stagescope_workers.canary.sequences.choose", None)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(ranks, "place", lambda: (0, 2))
    synced = Synced(monkeypatch, cpu_group="gloo")
    train(monkeypatch, prepare=synced.prepare)
    assert votes == [int(can)] * 2
    assert not synced.passes


def test_servers_that_sleep_after_the_sync_are_not_asked(
    fake: Patches, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    synced = Synced(monkeypatch)

    def prepare(trainer: Any, engine: Any) -> None:
        synced.prepare(trainer, engine)
        trainer._should_offload_rollout = True

    train(monkeypatch, prepare=prepare)
    assert {each.canary.side for each in synced.reports} == {"trainer"}
    assert "STAGESCOPE_CANARY asks no server: they share their devices" in caplog.text


def test_there_is_no_canary_by_default(fake: Patches, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = Synced(monkeypatch)
    monkeypatch.delenv(VARIABLE)
    train(monkeypatch, prepare=synced.prepare)
    assert synced.order == ["sync", "sync"]
    assert not synced.passes
