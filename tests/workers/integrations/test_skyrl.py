"""SkyRL's trainer by a fake with its recorded interface: the service's numbers against numpy's."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.api import Service, service
from tests.support.coordinators import FakeCoordinator, FakeService, wait_for
from tests.support.engines.tiny_llama import tiny_tokenizer
from tests.support.routes import marked, passes_of

from stagescope_wire.canary import FIXED, Canary
from stagescope_wire.errors import EngineError
from stagescope_workers import finish
from stagescope_workers.canary import engine_scorer
from stagescope_workers.canary.sequences import SCORED, of_tokenizer
from stagescope_workers.integrations import patches, skyrl, skyrl_canary
from stagescope_workers.integrations.canary import VARIABLE
from stagescope_workers.probe import handshake

PROMPT, WIDTH = 3, 6


class TensorBatch(dict[str, Any]):
    """SkyRL's batch: a dict with metadata."""

    metadata: dict[str, object]


class CallbackInput:
    def __init__(self, global_step: int, **fields: object) -> None:
        self.global_step, self.batch, self.logs = global_step, None, None
        vars(self).update(fields)


class TrainingCallback:
    def on_train_start(self, trainer: object, callback_input: object, control: object) -> None: ...

    def on_step_end(self, trainer: object, callback_input: object, control: object) -> None: ...

    def on_log(self, trainer: object, callback_input: object, control: object) -> None: ...


def batch(
    step: int, *, rollout: bool = True, stepwise: bool = False, padding: int = 2
) -> TensorBatch:
    """A right-aligned batch of four rows, and rows at its end that repeat the first."""
    rng = np.random.default_rng(step)
    lengths = [6, 4, 5, 2]
    rows = [*range(4), *[0] * padding]
    mask = np.array([[at >= WIDTH - lengths[row] for at in range(WIDTH)] for row in rows])
    loss = mask.copy()
    loss[1, WIDTH - 2] = False
    loss[4:] = False
    q = np.where(mask, -rng.exponential(1.0, mask.shape), 0.0)
    q[4:] = q[0]
    made = TensorBatch(
        sequences=torch.tensor(rng.integers(5, 90, (len(rows), PROMPT + WIDTH))),
        response_mask=torch.tensor(mask).long(),
        loss_mask=torch.tensor(loss).float(),
        rollout_logprobs=torch.tensor(q).float() if rollout else None,
        rewards=torch.tensor(np.where(mask, 0.25, 0.0)),
    )
    made.metadata = {"uids": ["a", "a", "b", "b", *["pad0", "pad1"][:padding]], "pad_size": padding}
    if stepwise:
        made.metadata["is_last_step"] = [False, True, True, True, *[True] * padding]
    return made


class WorkerDispatch:
    """What of SkyRL's dispatch is patched or called; its log-prob of a token is minus its id."""

    synced = 0

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        assert model_id is None
        self.synced += 1
        self.calls.append("sync")

    def get_lcm_dp_size(self) -> int:
        return 2

    def forward(
        self,
        model: str,
        data: TensorBatch,
        loss_fn: str | None = None,
        loss_fn_config: object = None,
        model_id: str | None = None,
    ) -> SimpleNamespace:
        self.calls.append(data)
        length: Any = data.metadata["response_length"]
        rows = data["sequences"][:, -length:]
        return types.SimpleNamespace(
            loss_fn_outputs=[{"logprobs": [-float(n) for n in row]} for row in rows]
        )

    def empty_cache(self, model: str | None = None) -> None: ...


class RemoteInferenceClient:
    """What of SkyRL's client is patched or read."""

    def __init__(self, urls: Sequence[str] = ("http://127.0.0.1:9",)) -> None:
        self.server_urls = list(urls)
        self.asleep = 0

    async def sleep(self, level: int = 2, tags: list[str] | None = None) -> None:
        self.asleep += 1


class RayPPOTrainer:
    """What of SkyRL's trainer is patched."""

    skips_forward = False
    fails = False
    counts_on = False
    """Whether the last checkpoint is saved after the step was counted on."""

    def __init__(self, cfg: object, callbacks: Sequence[object] | None = None) -> None:
        self.cfg = cfg
        self.global_step = 0
        self.callbacks = list(callbacks or [])
        self.dispatch = WorkerDispatch()
        self.inference_engine_client = RemoteInferenceClient()
        self.tokenizer = tiny_tokenizer()
        self.colocate_all = False
        self.saved: list[int] = []
        self.logged: list[dict[str, object]] = []
        self.batches: dict[int, TensorBatch] = {}

    def add_callback(self, callback: object) -> None:
        self.callbacks.append(callback)

    def _fire(self, name: str, **fields: object) -> None:
        for callback in self.callbacks:
            getattr(callback, name)(self, CallbackInput(self.global_step, **fields), None)

    @torch.no_grad()
    async def generate(self, input_batch: TensorBatch) -> TensorBatch:
        return input_batch

    @torch.no_grad()
    def fwd_logprobs_values_reward(self, training_input: TensorBatch) -> TensorBatch:
        q = training_input["rollout_logprobs"]
        noise = torch.tensor(
            np.random.default_rng(7).normal(0, 0.1, (len(training_input["sequences"]), WIDTH))
        )
        old = None if self.skips_forward else ((0.0 if q is None else q) + noise).float()
        training_input["action_log_probs"] = old
        return training_input

    def train_critic_and_policy(self, data: object) -> object:
        if self.fails:
            raise RuntimeError("out of memory")
        return {"policy_loss": 0.5 * self.global_step}

    @torch.no_grad()
    async def eval(self, vllm_metrics_scraper: object = None) -> dict[str, float]:
        return {"eval/score": float(self.global_step)}

    def save_checkpoints(self) -> str:
        self.saved.append(self.global_step)
        return f"global_step_{self.global_step}"

    async def train(self) -> None:
        await self.dispatch.save_weights_for_sampler()
        self._fire("on_train_start")
        self._fire("on_log", logs=await self.eval())
        for step in (1, 2):
            self.global_step = step
            data = await self.generate(batch(step))
            data = self.fwd_logprobs_values_reward(data)
            data["advantages"] = torch.ones(data["loss_mask"].shape)
            data.pop("rewards")
            data.metadata.pop("uids")
            self.batches[step] = data
            status = self.train_critic_and_policy(data)
            self._fire("on_step_end", batch=data, metrics=status)
            await self.dispatch.save_weights_for_sampler()
            if step == 2:
                await self.eval()
            logs = {"policy/loss": 0.5 * step, "note": "x"}
            self._fire("on_log", logs=logs)
            self.logged.append(logs)
        self.global_step += self.counts_on
        assert self.save_checkpoints() == f"global_step_{self.global_step}"


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """It fails where it has a callback."""

    counts_on = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.callbacks:
            raise NotImplementedError("Callbacks are not yet supported")

    def add_callback(self, callback: object) -> None:
        raise NotImplementedError("Callbacks are not yet supported")

    async def train(self) -> None:
        await super().train()


Trainers = tuple[type[RayPPOTrainer], type[RayPPOTrainer]]


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
        assert running.tokens is not None
        monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.operate)
        yield running


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> Trainers:
    """The two trainers in modules of SkyRL's names, patched."""
    kinds: tuple[tuple[str, type[Any], dict[str, object]], ...] = (
        ("skyrl.train.trainer", RayPPOTrainer, {"TrainingCallback": TrainingCallback}),
        ("skyrl.train.fully_async_trainer", FullyAsyncRayPPOTrainer, {}),
        ("skyrl.backends.skyrl_train.workers.worker_dispatch", WorkerDispatch, {}),
        (skyrl_canary.CLIENT_MODULE, RemoteInferenceClient, {}),
    )
    for module, kind, more in kinds:
        fake = types.ModuleType(module)
        names = ("__init__", "generate", "fwd_logprobs_values_reward", "train_critic_and_policy",
                 "train", "add_callback", "eval", "save_checkpoints",
                 "save_weights_for_sampler", "sleep")  # fmt: skip
        for name in names:
            if name in vars(kind):
                monkeypatch.setattr(kind, name, vars(kind)[name])  # undone after the patches
                monkeypatch.setattr(vars(kind)[name], "__module__", module)
        vars(fake).update({kind.__name__: kind, **more})
        monkeypatch.setitem(sys.modules, module, fake)
        for patch in skyrl.patches():
            if patch.module == module:
                patch.apply(fake)
                assert not patch.is_missing, str(patch)
    return RayPPOTrainer, FullyAsyncRayPPOTrainer


def config(run: str) -> SimpleNamespace:
    sampling = types.SimpleNamespace(temperature=0.7, top_p=1.0, top_k=-1)
    engine = types.SimpleNamespace(backend="vllm")
    return types.SimpleNamespace(
        trainer=types.SimpleNamespace(run_name=run, strategy="fsdp2"),
        generator=types.SimpleNamespace(sampling_params=sampling, inference_engine=engine),
    )


def test_a_training_is_reported_exactly(live: Service, trainers: Trainers) -> None:
    trainer = trainers[0](config("r"))
    asyncio.run(trainer.train())
    for step in (1, 2):
        data = trainer.batches[step]
        chosen = data["loss_mask"].bool().numpy()
        p, q = (data[n].double().numpy()[chosen] for n in ("action_log_probs", "rollout_logprobs"))
        answer = live.get(f"/steps/{step}/metrics", run="r")
        assert answer["coverage"]["tokens"] == len(p) == 16  # without the rows that pad
        assert answer["coverage"]["sequences"] == 4
        assert answer["metrics"]["rollout_corr/kl"] == pytest.approx((q - p).mean(), rel=1e-9)
        assert answer["metrics"]["per_round/total_rounds"] == 2
        # SkyRL's own number of the same: policy/rollout_train_logprobs_abs_diff_mean
        means = [
            np.abs(q_row - p_row)[mask].mean()
            for p_row, q_row, mask in zip(
                data["action_log_probs"].double().numpy(),
                data["rollout_logprobs"].double().numpy(), chosen, strict=True,
            )
            if mask.any()
        ]  # fmt: skip
        assert answer["metrics"]["train_rollout_logprob_abs_diff"] == pytest.approx(np.mean(means))
        stages = {row["stage"] for row in live.get(f"/steps/{step}/stages", run="r")["rows"]}
        last = {"evaluate", "save_checkpoint"} if step == 2 else set()
        assert stages == {
            "rollout_generate", "actor_compute_log_prob", "actor_update", "weight_sync", *last,
        }  # fmt: skip
    # What comes before the first step, and how the trainer's own calls went.
    assert [row["step"] for row in live.get("/steps", run="r")["rows"]] == [2, 1]
    assert trainer.dispatch.synced == 3
    assert trainer.saved == [2]
    rows = live.get("/steps/2/scalars", run="r")["rows"]
    assert {row["name"]: row["value"] for row in rows} == {"policy/loss": 1.0, "policy_loss": 1.0}
    samples = live.get("/steps/2/samples", run="r")["rows"]
    assert {row["sample_uid"] for row in samples} == {"a-0", "a-1", "b-0", "b-1"}


class PackedTensor:
    """SkyRL's ragged rows since 0.4.0."""

    def __init__(self, rows: list[Any]) -> None:
        self.values = torch.tensor(np.concatenate(rows))
        ends = np.cumsum([0, *map(len, rows)])
        self.cu_seqlens = torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_the_routes_of_the_engine_are_those_of_its_passes(
    live: Service, trainers: Trainers, with_routes: list[dict[str, Any]], form: str
) -> None:
    made: dict[str, Any] = batch(1)
    responses = made["response_mask"].sum(1).tolist()
    rows = marked([PROMPT + n for n in responses])
    padded = [np.pad(row, ((PROMPT + WIDTH - len(row), 0), (0, 0), (0, 0))) for row in rows]
    routes = torch.tensor(np.stack(padded)) if form == "padded" else PackedTensor(rows)

    class Routed(RayPPOTrainer):
        async def generate(self, input_batch: TensorBatch) -> TensorBatch:
            input_batch["rollout_expert_indices"] = routes
            return input_batch

    asyncio.run(Routed(config(f"routes-{form}")).train())
    tokens = [*passes_of(with_routes[0])]
    assert {row for row, *_ in tokens} == {0, 1, 2, 3}
    for row, column, of_row, token in tokens:
        assert (of_row, token) == (row, PROMPT + column - 1)


def test_turns_that_are_rows_belong_to_their_trajectory() -> None:
    made = skyrl.samples(batch(1, stepwise=True))
    assert made["run_ids"] == ["0", "0", "0", "1"]
    assert made["sample_ids"] == ["a-0-0", "a-0-1", "b-0-0", "b-1-0"]
    assert [row.tolist() for row in made["turn_ids"]] == [[0] * 6, [1] * 4, [0] * 5, [0] * 2]


def test_a_skipped_pass_is_not_measured_and_says_why(
    live: Service, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayPPOTrainer, "skips_forward", True)
    asyncio.run(trainers[0](config("skipped")).train())
    problem = live.problem(404, "/steps/1/metrics", run="skipped")
    assert "old_log_probs is left out: SkyRL skips the trainer's pass" in problem["detail"]


def test_the_asynchronous_trainer_gets_no_callback(live: Service, trainers: Trainers) -> None:
    trainer = trainers[1](config("async"))
    assert trainer.callbacks == []
    asyncio.run(trainer.train())
    assert live.get("/steps/2/metrics", run="async")["coverage"]["tokens"] == 16
    stages = {row["stage"] for row in live.get("/steps/2/stages", run="async")["rows"]}
    assert {"weight_sync", "evaluate"} <= stages
    # Its last checkpoint is saved when it has counted on: there is no step 3.
    assert trainer.saved == [3]
    assert {row["step"] for row in live.get("/steps", run="async")["rows"]} == {1, 2}


def test_a_forward_pass_of_a_subclass_is_recorded_at_the_steps_end(
    live: Service, trainers: Trainers
) -> None:
    class Own(RayPPOTrainer):
        def fwd_logprobs_values_reward(self, training_input: TensorBatch) -> TensorBatch:
            training_input["action_log_probs"] = training_input["rollout_logprobs"] - 0.1
            return training_input

    asyncio.run(Own(config("own")).train())
    metrics = live.get("/steps/1/metrics", run="own")["metrics"]
    assert metrics["rollout_corr/kl"] == pytest.approx(0.1, rel=1e-5)


def test_what_fails_here_fails_as_without(
    live: Service, trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception of the trainer is its own; one of ours is none of the trainer's."""
    monkeypatch.setattr(RayPPOTrainer, "fails", True)
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(trainers[0](config("fails")).train())
    finish(10, run="fails")
    monkeypatch.setattr(RayPPOTrainer, "fails", False)
    monkeypatch.setattr(skyrl, "responses", lambda data: 1 / 0)
    monkeypatch.setattr(skyrl, "init", lambda *args, **kwargs: 1 / 0)
    trainer = trainers[0](config("ours"))
    asyncio.run(trainer.train())
    assert [logs["policy/loss"] for logs in trainer.logged] == [0.5, 1.0]


@pytest.fixture
def synced(
    coordinator: FakeCoordinator,
    service: FakeService,
    trainers: Trainers,
    monkeypatch: pytest.MonkeyPatch,
) -> RayPPOTrainer:
    """A trainer with a canary, whose driver reports to the fake coordinator."""
    monkeypatch.setattr(handshake, "find_link", service.find)
    monkeypatch.setenv(VARIABLE, "1")
    coordinator.settle_at_once = True  # so that the driver's end waits for no payload
    module: Any = types.ModuleType("skyrl.backends.skyrl_train.training_batch")
    module.TrainingInputBatch = TensorBatch
    monkeypatch.setitem(sys.modules, module.__name__, module)
    told = config("canary")
    told.generator.sampling_params.temperature = 1.0
    told.generator.max_input_length, told.generator.sampling_params.max_generate_length = 300, 213
    told.trainer.micro_forward_batch_size_per_gpu = 3
    return trainers[0](told)


def test_a_canary_is_scored_before_each_sync_and_asked_after_it(
    synced: RayPPOTrainer, coordinator: FakeCoordinator
) -> None:
    asyncio.run(synced.train())
    calls = synced.dispatch.calls
    assert calls[1::2] == ["sync"] * 3
    rows = of_tokenizer(tiny_tokenizer(), max_length=512).rows
    for each in calls[::2]:
        assert len(each["sequences"]) == 12  # whole micro-batches on both ranks
        mask = each["attention_mask"].bool()
        sent = [
            tuple(own[kept].tolist()) for own, kept in zip(each["sequences"], mask, strict=True)
        ]
        assert sent == [*rows, *[rows[-1]] * (12 - len(rows))]
        assert mask[:, -1].all()  # padded on the left
    wait_for(lambda: len(coordinator.of_kind("canary")) == 6)
    events = [event.fields for event in coordinator.of_kind("canary")]
    clocks = [(each["side"], each["policy_version"], each["step"]) for each in events]
    assert sorted(clocks, key=str) == [
        (side, version, version or None) for side in ("engine", "trainer") for version in range(3)
    ]
    for fields in events:
        found = Canary.parse(fields)
        if found.side == "engine":
            assert found.source == "127.0.0.1-9"
            continue
        assert found.arms[FIXED].rows == rows
        for row, values in zip(rows, found.arms[FIXED].log_probs, strict=True):
            assert values == tuple(-float(token) for token in row[1:][-SCORED:])


def test_workers_score_no_canary_beside_colocated_servers_that_are_awake(
    synced: RayPPOTrainer,
) -> None:
    """At the first sync they may be; an update has sent them to sleep."""
    synced.colocate_all = True
    asyncio.run(synced.train())
    assert [each == "sync" for each in synced.dispatch.calls] == [True, False, True, False, True]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"temperature": 0.7}, "divides by the temperature 0.7"),
        ({"enable_sample_support_replay": True}, "the tokens that an engine allowed"),
    ],
)
def test_a_canary_that_the_pass_cannot_score_is_only_asked(
    synced: RayPPOTrainer,
    coordinator: FakeCoordinator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
    why: str,
) -> None:
    monkeypatch.setattr(patches, "_logged", set())
    trainer: Any = synced.cfg
    trainer.trainer.algorithm = types.SimpleNamespace(**change)
    asyncio.run(synced.train())
    assert synced.dispatch.calls == ["sync"] * 3
    assert why in caplog.text
    wait_for(lambda: len(coordinator.of_kind("canary")) == 3)
    assert {event.fields["side"] for event in coordinator.of_kind("canary")} == {"engine"}


def test_servers_sleep_when_no_request_of_a_canary_is_left(
    synced: RayPPOTrainer, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, opened, done = threading.Event(), threading.Event(), list[str]()

    def ask(*_: object, **__: object) -> object:
        reached.set()
        assert opened.wait(30)
        done.append("asked")
        raise EngineError("the engine has gone")

    async def generate(trainer: RayPPOTrainer, data: TensorBatch) -> TensorBatch:
        if trainer.global_step == 2:
            assert await asyncio.to_thread(reached.wait, 30)
            threading.Timer(0.2, opened.set).start()
            await trainer.inference_engine_client.sleep()
            done.append("sleeps")
        return data

    monkeypatch.setattr(engine_scorer, "connect", ask)
    monkeypatch.setattr(RayPPOTrainer, "generate", generate)
    asyncio.run(synced.train())
    assert done[done.index("sleeps") - 1] == "asked"
    wait_for(lambda: len(coordinator.of_kind("canary")) == 6)
    problems = [str(event.fields.get("problem")) for event in coordinator.of_kind("canary")]
    assert any(problem.startswith("the engine was put to sleep") for problem in problems)


def test_no_canary_is_the_default(
    synced: RayPPOTrainer, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    asyncio.run(synced.train())
    assert synced.dispatch.calls == ["sync"] * 3
    assert coordinator.of_kind("canary") == []
