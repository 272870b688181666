"""SkyRL's `RayPPOTrainer` on its driver: stages, streams, samples and scalars of each step.

Read in SkyRL 0.3.0 (a9564572) and 0.4.0. A callback of ours gets the trainer's log. It is added
when `RayPPOTrainer` is made, since SkyRL's entry points pass none. `FullyAsyncRayPPOTrainer` fails
with a callback, so it gets none. Its stages and streams come from the methods that it shares with
`RayPPOTrainer`, and its log has no numbers of ours.

A batch is right-aligned: the last columns of row r are its response. Rows that pad the batch to the
number of ranks repeat row 0 with a mask of zeros; they are left out. Losses that optimize against
the rollout's log-probs skip the trainer's pass: such a step is not measured, and says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from stagescope_wire.tensors import ROUTES_REFUSED
from stagescope_workers.integrations import canary, skyrl_canary, weights
from stagescope_workers.integrations.configuration import (
    lookup,
    named_run,
    sampling,
    visible_leaves,
)
from stagescope_workers.integrations.patches import (
    Function,
    Patch,
    Wrap,
    guarded,
    running,
    staged,
    wrapper,
)
from stagescope_workers.integrations.training import (
    COLUMNS,
    ReportedTraining,
    behind_masked,
    closed_at_end,
    one_a_trainer,
    scalars,
)
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    import torch

    from stagescope_workers.canary.after_syncs import WeightCanary

_MODULE: Final = "skyrl.train.trainer"
_ASYNC: Final = "skyrl.train.fully_async_trainer"
_DISPATCH: Final = "skyrl.backends.skyrl_train.workers.worker_dispatch"
_RESPONSES: Final = (
    "loss_mask", "rollout_logprobs", "action_log_probs", "base_action_log_probs", "values",
    "advantages", "returns",
)  # fmt: skip
"""The columns [rows, response width]."""
NOT_RETURNED: Final = "SkyRL's generator returned no log-probs: the mismatch is not measured"
NOT_COMPUTED: Final = (
    "SkyRL skips the trainer's pass where the loss optimizes against the rollout's log-probs: the "
    "mismatch is not measured"
)


def patches() -> list[Patch]:
    """Return the patches of `RayPPOTrainer`; its subclasses inherit or call all but `train`."""
    calls: dict[str, tuple[Wrap, str]] = {
        "__init__": (wrap_init, "a training's end, scalars, and numbers in the trainer's log"),
        "generate": (wrap_generate, "rollout_generate"),
        "fwd_logprobs_values_reward": (wrap_forward, "actor_compute_log_prob, streams and samples"),
        "train_critic_and_policy": (wrap_update, "actor_update"),
        "eval": (wrap_eval, "evaluate"),
        "save_checkpoints": (wrap_save, "save_checkpoint"),
    }
    found = [
        Patch(_MODULE, f"RayPPOTrainer.{name}", wrap, purpose, since="0.3")
        for name, (wrap, purpose) in calls.items()
    ]
    purpose = "the end of a training that fails"
    return [
        *found,
        Patch(_MODULE, "RayPPOTrainer.train", wrap_train, purpose, since="0.3"),
        Patch(_ASYNC, "FullyAsyncRayPPOTrainer.train", wrap_train, purpose, since="0.3"),
        Patch(_DISPATCH, "WorkerDispatch.save_weights_for_sampler", wrap_weight_sync,
              "weight_sync", since="0.3"),
        Patch(skyrl_canary.CLIENT_MODULE, "RemoteInferenceClient.sleep", wrap_sleep,
              "the end of a canary before the servers sleep", since="0.3"),
    ]  # fmt: skip


Batch: TypeAlias = Any
"""Attributes read from SkyRL's `TrainingInputBatch`: metadata, __getitem__, get."""
Trainer: TypeAlias = Any
"""Attributes read from SkyRL's `RayPPOTrainer`: cfg, global_step, dispatch, add_callback."""


_CallbackInput: TypeAlias = Any
"""The data that SkyRL hands to a callback: global_step, batch, logs."""


class Training(ReportedTraining):
    """Reports one trainer."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._last = 0
        self.recorded = 0
        """The last step whose streams were recorded."""
        self.resumed = 0
        """The global step of the checkpoint, if the callback received it."""
        self.ids: dict[str, object] = {}
        """The ids of the batch that is trained; SkyRL removes them from it before the update."""
        self.canary: WeightCanary | None = None

    @property
    def step(self) -> int:
        """The step that is worked on."""
        return int(self.trainer.global_step)

    @property
    def last_step(self) -> int | None:
        """The step of the last stage that was reported."""
        return self._last or None

    def _make_probe(self) -> Probe:
        config = self.trainer.cfg
        name = str(lookup(config, "trainer", "run_name") or "skyrl")
        done = self.step - 1
        return init(
            named_run(name, fallback="skyrl"),
            role="driver",
            rank=0,
            world_size=1,
            layout={"framework": "skyrl"},
            settings={**statistics_settings(config), "skyrl": settings(config)},
            resumed_from_step=done if done > 0 else None,
            captures="SkyRL's models run in workers of their own, which do not report",
        )

    def stage(self, name: str) -> Stage:
        """Return a stage of the step that is worked on."""
        self._last = step = self.step
        return self.probe.stage(name, step=step, policy_version=step - 1)

    @property
    def is_trained(self) -> bool:
        """Whether the batch of the step was recorded, as it is before the update."""
        return self.recorded > 0 and self.recorded == self.step

    def close(self, error: BaseException | None) -> None:
        """Send what waits: the training is over, or ends with `error`."""
        found, self.canary = self.canary, None
        if found is not None:
            found.before_sync("the training ended")
        super().close(error)


training: Final = one_a_trainer(Training)
_trainers: Final[weakref.WeakKeyDictionary[object, weakref.ref[Trainer]]] = (
    weakref.WeakKeyDictionary()
)
"""Dispatch -> the trainer that has it."""


def settings(config: object) -> dict[str, object]:
    """Return SkyRL's configuration (nested dataclasses) without what may be secret."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return {}
    return visible_leaves(dict(dataclasses.asdict(config).items()))


_THRESHOLDS: Final = {
    "token": "token_tis_ratio_clip_high", "sequence": "sequence_tis_ratio_clip_high"
}  # fmt: skip
"""SkyRL's levels of truncated importance sampling -> the option with its bound."""


def statistics_settings(config: object) -> dict[str, object]:
    """Return the settings that the statistics depend on: which importance weights are applied."""
    correction = lookup(config, "trainer", "algorithm", "off_policy_correction")
    if not weights.has(correction, "tis_ratio_type"):
        return weights.not_known("SkyRL", "trainer.algorithm.off_policy_correction.tis_ratio_type")
    kind = lookup(correction, "tis_ratio_type")
    if kind is None:
        return {}
    if kind not in _THRESHOLDS:
        return weights.not_computed("SkyRL", f"its tis_ratio_type is {kind}")
    if not weights.has(correction, _THRESHOLDS[kind]):
        return weights.not_known("SkyRL", _THRESHOLDS[kind])
    return weights.applied(
        "SkyRL", kind, "cut", low=None, high=lookup(correction, _THRESHOLDS[kind])
    )


def streams(config: object, names: Sequence[str]) -> dict[str, object]:
    """Return who produced the streams among `names`, and how the tokens were sampled."""
    engine = str(lookup(config, "generator", "inference_engine", "backend") or "vllm")
    sampled = sampling(lookup(config, "generator", "sampling_params"))
    own = {"producer": "trainer", "engine": str(lookup(config, "trainer", "strategy") or "fsdp")}
    rollout = {"producer": engine, "engine": engine, **sampled}
    found: dict[str, object] = {"old": own} if "old_log_probs" in names else {}
    return {**found, **({"rollout": rollout} if "rollout_log_probs" in names else {})}


def responses(batch: Batch) -> dict[str, list[torch.Tensor] | str]:
    """Return the columns of a batch by the names of `Stage.record`, as rows without padding."""
    columns = {name: batch.get(name, None) for name in _RESPONSES}
    mask = batch["response_mask"]
    count = _count(batch)
    width = int(mask.shape[1])
    lengths = [int(row) for row in mask[:count].sum(1).tolist()]
    names = COLUMNS["skyrl"]
    found: dict[str, list[torch.Tensor] | str] = {
        names[name]: [values[row, width - length :] for row, length in enumerate(lengths)]
        for name, values in columns.items()
        if values is not None and tuple(values.shape) == tuple(mask.shape)
    }
    sequences = batch["sequences"]
    total = int(sequences.shape[1])
    found["responses"] = [sequences[row, total - n :] for row, n in enumerate(lengths)]
    routes = _routes(batch, total)
    if routes:
        rows = zip(routes, lengths, strict=False)  # without those that pad the batch
        found["rollout_routed_experts"] = [behind_masked(row[-n - 1 : -1]) for row, n in rows]
    elif batch.get("rollout_expert_indices", None) is not None:
        found[ROUTES_REFUSED] = "rollout_expert_indices has a form that is not known"
    return found


def _routes(batch: Batch, width: int) -> Sequence[torch.Tensor]:
    """Return the experts that the engine chose for each row, [tokens, layers, K]; () without.

    They are as wide as `sequences`, or a `PackedTensor` of rows without padding. Both end with the
    last token, which no pass reads.
    """
    routes = batch.get("rollout_expert_indices", None)
    ends = getattr(routes, "cu_seqlens", None)
    if ends is not None:
        return [routes.values[a:b] for a, b in itertools.pairwise(ends.tolist())]
    if getattr(routes, "ndim", 0) == 4 and routes.shape[1] == width:
        return list(routes)
    return ()


def _count(batch: Batch) -> int:
    """Return the rows without those at the end that pad the batch."""
    padding = int((batch.metadata or {}).get("pad_size") or 0)
    return int(batch["sequences"].shape[0]) - padding


def rewards(batch: Batch) -> torch.Tensor | None:
    """Return the reward of each row, [rows]; None once SkyRL has taken them out of the batch."""
    found = batch.get("rewards", None)
    if found is None:
        return None
    found = found[: _count(batch)]
    rows: torch.Tensor = found.sum(-1) if found.dim() == 2 else found
    return rows


def samples(batch: Batch) -> dict[str, Any]:
    """Return the rows' ids: one for each answer of a prompt, or each turn of a trajectory."""
    metadata = batch.metadata or {}
    count = _count(batch)
    uids = [str(uid) for uid in (metadata.get("uids") or ())][:count]
    if len(uids) != count:
        return {}
    last = metadata.get("is_last_step")
    runs: list[str] = []
    turns: list[int] = []
    ended: Counter[str] = Counter()
    turn = 0
    for row, uid in enumerate(uids):
        runs.append(str(ended[uid]))
        turns.append(turn)
        is_last = last is None or bool(last[row])
        ended[uid] += is_last
        turn = 0 if is_last else turn + 1
    if last is None:
        names = [f"{uid}-{run}" for uid, run in zip(uids, runs, strict=True)]
        return {"sample_ids": names, "group_ids": uids, "run_ids": runs}
    names = [f"{uid}-{run}-{n}" for uid, run, n in zip(uids, runs, turns, strict=True)]
    lengths = batch["response_mask"][:count].sum(1).tolist()
    of_tokens = [np.full(int(n), turn) for n, turn in zip(lengths, turns, strict=True)]
    return {"sample_ids": names, "group_ids": uids, "run_ids": runs, "turn_ids": of_tokens}


def make_callback(base: type) -> object:
    """Return a `TrainingCallback` (`base`) that reports what a trainer logs; it never raises."""

    class StagescopeCallback(base):  # type: ignore[misc]
        """Reports to stagescope, and adds the service's numbers to the trainer's log."""

        def on_train_start(
            self, trainer: Trainer, callback_input: _CallbackInput, control: object
        ) -> None:
            with guarded("the start of a training"):
                training(trainer).resumed = int(callback_input.global_step)

        def on_step_end(
            self, trainer: Trainer, callback_input: _CallbackInput, control: object
        ) -> None:
            with guarded("streams and samples"):
                found, batch = training(trainer), callback_input.batch
                # A subclass may have a forward pass of its own.
                if batch is not None and found.recorded != int(callback_input.global_step):
                    stage = found.stage("actor_compute_log_prob")
                    stage.begin()
                    record_batch(trainer, stage, batch)
                    stage.end()
                    found.want(found.recorded)

        def on_log(self, trainer: Trainer, callback_input: _CallbackInput, control: object) -> None:
            with guarded("scalars"):
                found, logs = training(trainer), callback_input.logs
                step = int(callback_input.global_step)
                # An evaluation before the first step belongs to none of this training.
                if step > found.resumed and isinstance(logs, dict):
                    found.probe.log(step=step, **scalars(logs))
                    for name, value in found.numbers(step).items():
                        logs.setdefault(name, value)

    return StagescopeCallback()


@wrapper
def wrap_init(function: Function, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
    """Wrap `__init__`: it adds the callback, if the trainer accepts callbacks."""
    function(trainer, *args, **kwargs)
    with guarded("the callback"):
        module: ModuleType = sys.modules[function.__module__]
        # FullyAsyncRayPPOTrainer overrides it, and fails where it has a callback.
        if type(trainer).add_callback is module.RayPPOTrainer.add_callback:
            trainer.add_callback(make_callback(module.TrainingCallback))


@wrapper
async def wrap_train(function: Function, trainer: Trainer, *args: Any, **kwargs: Any) -> object:
    """Wrap `train`: when it ends, everything that waits is sent."""
    with guarded("weight_sync"):
        _trainers[trainer.dispatch] = weakref.ref(trainer)
    with closed_at_end(lambda error: training(trainer).close(error)):
        return await function(trainer, *args, **kwargs)


@staged("rollout_generate")
def wrap_generate(trainer: Trainer, *args: object, **kwargs: object) -> Stage | None:
    """Wrap `generate`, a coroutine."""
    return training(trainer).stage("rollout_generate")


@staged("evaluate")
def wrap_eval(trainer: Trainer, *args: object, **kwargs: object) -> Stage | None:
    """Wrap `eval`, a coroutine."""
    return _last_stage(trainer, "evaluate")


def wrap_weight_sync(function: Function) -> Function:
    """Wrap the dispatch's `save_weights_for_sampler`, a coroutine: the stage, and its canary."""
    return _with_canary(_in_sync(function))


@staged("weight_sync")
def _in_sync(dispatch: object, *args: object, **kwargs: object) -> Stage | None:
    trainer = _trainer_of(dispatch)
    return None if trainer is None else _last_stage(trainer, "weight_sync")


@wrapper
async def _with_canary(
    function: Function, dispatch: object, *args: object, **kwargs: object
) -> object:
    trainer = None if canary.every() is None else _trainer_of(dispatch)
    with contextlib.nullcontext() if trainer is None else skyrl_canary.around(training(trainer)):
        return await function(dispatch, *args, **kwargs)


def _trainer_of(dispatch: object) -> Trainer | None:
    reference = _trainers.get(dispatch)
    return None if reference is None else reference()


@wrapper
async def wrap_sleep(function: Function, client: object, *args: object, **kwargs: object) -> object:
    """Wrap the client's `sleep`, a coroutine: no canary's request waits at a sleeping server."""
    if canary.every() is not None:
        with guarded("the canary"):
            found = [training(each) for each in map(_trainer_of, [*_trainers]) if each is not None]
            own = [each for each in found if each.trainer.inference_engine_client is client]
            await skyrl_canary.drop(each.canary for each in own)
    return await function(client, *args, **kwargs)


@staged("save_checkpoint")
def wrap_save(trainer: Trainer, *args: object, **kwargs: object) -> Stage | None:
    """Wrap `save_checkpoints`."""
    return _last_stage(trainer, "save_checkpoint")


def _stage(trainer: Trainer, name: str) -> Stage | None:
    stage: Stage | None = None
    with guarded(name):
        stage = training(trainer).stage(name)
    return stage


def _last_stage(trainer: Trainer, name: str) -> Stage | None:
    """Return a stage that follows the update; None outside a step.

    Before its first step a training syncs and evaluates its initial weights. The asynchronous one
    saves its last weights after it has increased its step. Both belong to no step.
    """
    found = training(trainer)
    return found.stage(name) if found.is_trained else None


@wrapper
def wrap_forward(function: Function, trainer: Trainer, *args: Any, **kwargs: Any) -> object:
    """Wrap `fwd_logprobs_values_reward`: it completes the streams of the batch that it returns."""
    stage = _stage(trainer, "actor_compute_log_prob")
    with running(stage):
        batch = function(trainer, *args, **kwargs)
        with guarded("streams and samples"):
            if stage is not None:
                record_batch(trainer, stage, batch)
    with guarded("numbers for the log"):
        training(trainer).want(training(trainer).step)
    return batch


def record_batch(trainer: Trainer, stage: Stage, batch: Batch) -> None:
    """Record the streams, the rewards and the ids of a batch."""
    found = training(trainer)
    found.ids = samples(batch)
    stage.record({**_streams_of(trainer, batch), **found.ids})
    found.recorded = found.step


def _streams_of(trainer: Trainer, batch: Batch) -> dict[str, object]:
    found = responses(batch)
    left_out: dict[str, str] = {}
    if "old_log_probs" not in found:
        left_out["old_log_probs"] = NOT_COMPUTED
    if "rollout_log_probs" not in found:
        left_out["rollout_log_probs"] = NOT_RETURNED
    scores = rewards(batch)
    return {
        **found,
        **({} if scores is None else {"rewards": scores}),
        **({"left_out": left_out} if left_out else {}),
        "streams": streams(trainer.cfg, [*found]),
    }


@wrapper
def wrap_update(
    function: Function, trainer: Trainer, batch: Batch, *args: Any, **kwargs: Any
) -> object:
    """Wrap `train_critic_and_policy`: the batch has advantages, and the metrics are its result."""
    stage = _stage(trainer, "actor_update")
    with running(stage):
        status = function(trainer, batch, *args, **kwargs)
        with guarded("the metrics of an update"):
            if stage is not None:
                names = ("response_mask", "responses", "advantages", "returns", "values")
                found = responses(batch)
                held = {name: found[name] for name in names if name in found}
                stage.record({**held, **training(trainer).ids})
                stage.log(**scalars(status))
    return status
