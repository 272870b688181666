"""TRL's `GRPOTrainer`: stages, streams, samples and scalars of a training that does not change.

Steps are numbered as TRL logs them: the first is 1. The rollout's log-probs are those that its
generation returned (vLLM, or a `rollout_func`); generation by transformers returns none, and the
step says so. The trainer's are of the pass before the update where TRL makes one
(`actor_compute_log_prob`), else of the update's own forward passes (`actor_update`): then all of
them belong to the weights that the step began with.

Read in TRL 1.16: `_generate_and_score_completions` returns the rows of a generation batch, which
are shuffled and divided into micro-batches together with a column of ours that names them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from stagescope_workers.integrations.configuration import named_run, visible_leaves
from stagescope_workers.integrations.guard import guarded, running
from stagescope_workers.integrations.patches import Function, Patch, Wrap
from stagescope_workers.integrations.training import (
    ReportedTraining,
    alive,
    closed_at_end,
    one_a_trainer,
    scalars,
)
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("stagescope.integrations")

_MODULE: Final = "trl.trainer.grpo_trainer"
_ROWS: Final = "stagescope_rows"
"""The column that names the rows of a generation batch, [rows] int64 on the host."""
_CLIPPED_LOSSES: Final = ("grpo", "bnpo", "dr_grpo", "dapo")
"""The losses that cut a token's ratio at bounds, with TRL's own formula."""
_MAY_BE_NAN: Final = "rewards/"
"""A reward function that returns None for every completion of a batch has the mean nan."""


def patches() -> list[Patch]:
    """Return the patches of `GRPOTrainer`; its subclasses inherit them."""
    calls: dict[str, tuple[Wrap, str]] = {
        "__init__": (wrap_init, "the end of a training"),
        "_generate_and_score_completions": (wrap_generation_batch, "streams and samples"),
        "_generate": (wrap_generate, "rollout_generate"),
        "_calculate_rewards": (wrap_rewards, "compute_rm_score and rewards"),
        "_get_per_token_logps_and_entropies": (
            wrap_forward, "actor_compute_log_prob, ref_compute_log_prob"
        ),
        "_compute_loss": (wrap_loss, "actor_update and what the loss did to each token"),
        "training_step": (wrap_training_step, "the end of actor_update"),
        "log": (wrap_log, "scalars, and numbers in the trainer's log"),
    }  # fmt: skip
    return [
        Patch(_MODULE, f"GRPOTrainer.{name}", wrap, purpose, since="1.0")
        for name, (wrap, purpose) in calls.items()
    ]


class Arguments(Protocol):
    """What is read of TRL's `GRPOConfig`, where its class has it in every version."""

    output_dir: str | None
    generation_batch_size: int
    steps_per_generation: int
    gradient_accumulation_steps: int
    vllm_importance_sampling_correction: bool
    vllm_importance_sampling_clip_max: float | None

    def to_dict(self) -> dict[str, object]: ...  # noqa: D102


class _State(Protocol):
    global_step: int


class _Accelerator(Protocol):
    process_index: int
    num_processes: int
    is_main_process: bool


class Trainer(Protocol):
    """What is read of TRL's `GRPOTrainer`."""

    state: _State
    args: Arguments
    accelerator: _Accelerator
    model: torch.nn.Module
    ref_model: torch.nn.Module | None
    train: Function
    rollout_func: object
    use_vllm: bool
    vllm_importance_sampling_correction: bool
    num_generations: int
    num_iterations: int
    beta: float
    loss_type: str
    importance_sampling_level: str
    epsilon_low: float
    epsilon_high: float
    reward_weights: torch.Tensor
    """[functions]."""
    _metrics: Mapping[str, Mapping[str, list[float]]]


@dataclasses.dataclass
class _GenerationBatch:
    """What is being learnt of the generation batch that is made.

    Attributes:
        step: The step that generates it.
        number: How many the step has made before.
        old: The trainer's log-probs, [rows, tokens], where TRL computes them before the update.
        rewards: Of this process's rows, [rows].
        stage: The stage of `old`.
    """

    step: int
    number: int
    rewards: torch.Tensor | None = None
    stage: Stage | None = None


class Training(ReportedTraining[Trainer]):
    """What one `GRPOTrainer` reports."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._batches: tuple[int, int] = (-1, 0)
        self._microbatches: tuple[int, int] = (-1, 0)
        self.generating: _GenerationBatch | None = None
        self.update: Stage | None = None
        self.in_loss: list[torch.Tensor] | None = None
        """The log-probs of the update's forward pass, while its loss is computed."""

    @property
    def step(self) -> int:
        """The step that is being trained."""
        return int(self.trainer.state.global_step) + 1

    @property
    def is_training(self) -> bool:
        """Whether it trains; evaluation belongs to no step."""
        return bool(self.trainer.model.training)

    @property
    def last_step(self) -> int | None:
        """The last step that is done."""
        return int(self.trainer.state.global_step) or None

    @property
    def writes_log(self) -> bool:
        """Whether this process writes TRL's log."""
        return bool(self.trainer.accelerator.is_main_process)

    def _make_probe(self) -> Probe:
        trainer = self.trainer
        arguments = trainer.args
        name = getattr(arguments, "run_name", None) or os.path.basename(
            os.path.abspath(str(arguments.output_dir or "trl"))
        )
        return init(
            named_run(str(name), fallback="trl"),
            role="actor",
            rank=trainer.accelerator.process_index,
            world_size=trainer.accelerator.num_processes,
            layout={"framework": "trl"},
            settings={**statistics_settings(trainer), "trl": settings(arguments)},
            resumed_from_step=self.last_step,
        )

    def stage(self, name: str, **part: int) -> Stage:
        """Return a stage of the step that is being trained."""
        version = int(self.trainer.state.global_step)
        return self.probe.stage(
            name, step=self.step, policy_version=version, model=self.trainer.model, **part
        )

    def next_batch(self) -> _GenerationBatch:
        """Begin a generation batch of the step."""
        step, count = self._batches
        number = count if step == self.step else 0
        self._batches = (self.step, number + 1)
        self.generating = _GenerationBatch(self.step, number)
        return self.generating

    def next_microbatch(self) -> int:
        """Return the number of the step's next micro-batch."""
        step, count = self._microbatches
        number = count if step == self.step else 0
        self._microbatches = (self.step, number + 1)
        return number

    def want(self, step: int, rows: int | None = None) -> None:
        """Request the step's numbers: complete with the samples of all processes."""
        if rows is None and self.trainer.accelerator.num_processes > 1:
            rows = self.trainer.args.generation_batch_size
        super().want(step, rows)


training: Final = one_a_trainer(Training)


def settings(arguments: Arguments) -> dict[str, object]:
    """Return TRL's arguments, without what may be secret."""
    return visible_leaves(dict(arguments.to_dict().items()))


def statistics_settings(trainer: Trainer) -> dict[str, object]:
    """Return the settings that the statistics depend on: which importance weights are applied."""
    arguments = trainer.args
    mode = str(getattr(arguments, "vllm_importance_sampling_mode", ""))
    is_corrected = trainer.use_vllm and arguments.vllm_importance_sampling_correction
    if not (is_corrected and mode.endswith("_truncate")):
        return {}
    threshold = arguments.vllm_importance_sampling_clip_max
    found = {"rollout_is": mode.removesuffix("_truncate"), "rollout_is_threshold": threshold}
    return {name: value for name, value in found.items() if value is not None}


def streams(trainer: Trainer, *, has_rollout: bool) -> dict[str, object]:
    """Return who produced the streams of a batch, and how its tokens were sampled."""
    if trainer.rollout_func is not None:
        engine = "rollout_func"
    else:
        engine = "vllm" if trainer.use_vllm else "transformers"
    own = {"producer": "trainer", "engine": "transformers"}
    sampling = {name: getattr(trainer, name, None) for name in ("temperature", "top_p", "top_k")}
    rollout = {"producer": engine, "engine": engine, **sampling} if has_rollout else None
    found = {"rollout": rollout, "old": own, "current": own}
    return {
        "streams": {
            stream: {name: value for name, value in fields.items() if value is not None}
            for stream, fields in found.items()
            if fields is not None
        }
    }


def samples(trainer: Trainer, rows: torch.Tensor) -> dict[str, list[str]]:
    """Return the ids of the rows of a generation batch, by the column that names them."""
    size = int(trainer.num_generations)
    numbers = [int(row) for row in rows.tolist()]
    return {
        "sample_ids": [f"{row // size}-{row % size}" for row in numbers],
        "group_ids": [str(row // size) for row in numbers],
        "run_ids": [str(row % size) for row in numbers],
    }


def wrap_init(function: Function) -> Function:
    """Wrap `__init__`: when `train` ends, everything that waits is sent."""

    @functools.wraps(function)
    def run(trainer: Trainer, *args: object, **kwargs: object) -> None:
        function(trainer, *args, **kwargs)
        with guarded("waiting for receipts at the end of a training"):
            trainer.train = _wrap_train(trainer, trainer.train)

    return run


def _wrap_train(trainer: Trainer, train: Function) -> Function:
    held = weakref.ref(trainer)

    @functools.wraps(train)
    def run(*args: object, **kwargs: object) -> object:
        with closed_at_end(lambda error: training(alive(held)).close(error)):
            return train(*args, **kwargs)

    return run


@contextlib.contextmanager
def _generation(trainer: Trainer) -> Iterator[_GenerationBatch | None]:
    """Yield the generation batch that the body makes; None in evaluation."""
    batch: _GenerationBatch | None = None
    with guarded("a generation batch"):
        if training(trainer).is_training:
            batch = training(trainer).next_batch()
    try:
        yield batch
    finally:
        with guarded("a generation batch"):
            training(trainer).generating = None


def wrap_generation_batch(function: Function) -> Function:
    """Wrap `_generate_and_score_completions`: names its rows, and records what it returned."""

    @functools.wraps(function)
    def run(trainer: Trainer, *args: object, **kwargs: object) -> object:
        with _generation(trainer) as batch:
            output = function(trainer, *args, **kwargs)
            if batch is not None:
                with guarded("streams and samples"):
                    _record_batch(trainer, batch, output)
        return output

    return run


def _record_batch(
    trainer: Trainer, batch: _GenerationBatch, output: dict[str, torch.Tensor]
) -> None:
    import torch

    count = output["completion_ids"].size(0)
    accelerator = trainer.accelerator
    total = count * accelerator.num_processes
    first = batch.number * total + accelerator.process_index * count
    output[_ROWS] = torch.arange(first, first + count)
    stage, batch.stage = batch.stage, None
    if stage is None:
        return
    recorded = {
        **_tokens(trainer, output),
        **_rows_of(output, "old_log_probs", "old_per_token_logps"),
        **_rows_of(output, "ref_log_probs", "ref_per_token_logps"),
        **({} if batch.rewards is None else {"rewards": batch.rewards}),
    }
    stage.record(recorded)
    stage.end()
    training(trainer).want(batch.step)


def _tokens(trainer: Trainer, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what every record of a batch has: mask, tokens, rollout stream, ids, producers."""
    mask = inputs["completion_mask"]
    if inputs.get("tool_mask") is not None:
        mask = mask * inputs["tool_mask"]
    rollout = inputs.get("sampling_per_token_logps")
    return {
        "response_mask": mask,
        "responses": inputs["completion_ids"],
        "advantages": _by_token(inputs["advantages"], mask),
        **({} if rollout is None else {"rollout_log_probs": rollout}),
        **samples(trainer, inputs[_ROWS]),
        **streams(trainer, has_rollout=rollout is not None),
    }


def _rows_of(inputs: Mapping[str, torch.Tensor], name: str, theirs: str) -> dict[str, torch.Tensor]:
    return {} if inputs.get(theirs) is None else {name: inputs[theirs]}


def _by_token(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values.unsqueeze(1).expand(mask.shape) if values.dim() == 1 else values


def _in_stage(name: str, activity: str) -> Wrap:
    """Return a wrapper that runs a method as a stage of the batch that is being generated."""

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def run(trainer: Trainer, *args: object, **kwargs: object) -> object:
            stage: Stage | None = None
            with guarded(activity):
                batch = training(trainer).generating
                if batch is not None:
                    stage = training(trainer).stage(name, occurrence=batch.number)
            with running(stage):
                return function(trainer, *args, **kwargs)

        return run

    return wrap


wrap_generate = _in_stage("rollout_generate", "rollout_generate")


def wrap_rewards(function: Function) -> Function:
    """Wrap `_calculate_rewards`, which returns [rows of all processes, functions]."""
    in_stage: Function = _in_stage("compute_rm_score", "compute_rm_score")(function)

    @functools.wraps(function)
    def run(trainer: Trainer, *args: object, **kwargs: object) -> object:
        rewards = in_stage(trainer, *args, **kwargs)
        with guarded("rewards"):
            batch = training(trainer).generating
            if batch is not None:
                weighted = rewards * trainer.reward_weights.to(rewards.device).unsqueeze(0)
                count = rewards.size(0) // trainer.accelerator.num_processes
                begin = trainer.accelerator.process_index * count
                # A completion that no function scored has no reward: nan, as in TRL's own log.
                total = weighted.nansum(dim=1)
                total[rewards.isnan().all(dim=1)] = math.nan
                batch.rewards = total[begin : begin + count]
        return rewards

    return run


def wrap_forward(function: Function) -> Function:
    """Wrap the forward pass: before the update it is a stage, within the loss it is the trainer's.

    Of the trainer's log-probs before the update the stage stays open until the whole batch is
    known: it has the streams.
    """

    @functools.wraps(function)
    def run(trainer: Trainer, model: object, *args: object, **kwargs: object) -> object:
        stage: Stage | None = None
        is_reference = False
        with guarded("a forward pass"):
            found = training(trainer)
            batch = found.generating
            if batch is not None:
                is_reference = _is_reference(trainer, model, batch)
                name = "ref_compute_log_prob" if is_reference else "actor_compute_log_prob"
                stage = found.stage(name, occurrence=batch.number)
                if not is_reference:
                    stage.begin()
                    batch.stage = stage
        if is_reference:
            with running(stage):
                return function(trainer, model, *args, **kwargs)
        try:
            result = function(trainer, model, *args, **kwargs)
        except BaseException as error:
            with guarded("a forward pass"):
                if stage is not None:
                    stage.end(error)
            raise
        with guarded("the trainer's log-probs"):
            passes = training(trainer).in_loss
            if passes is not None:
                passes.append(result[0].detach())
        return result

    return run


def _is_reference(trainer: Trainer, model: object, batch: _GenerationBatch) -> bool:
    """Return whether a forward pass before the update is the reference's.

    Without a model of its own the reference is the policy without its adapter: the second pass, or
    the only one where the trainer's own is not made.
    """
    if trainer.ref_model is not None:
        return model is trainer.ref_model
    return trainer.beta != 0.0 and (batch.stage is not None or not _makes_old(trainer))


def _makes_old(trainer: Trainer) -> bool:
    every = trainer.args.steps_per_generation * trainer.num_iterations
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    return bool(trainer.args.gradient_accumulation_steps % every != 0 or corrects)


def wrap_loss(function: Function) -> Function:
    """Wrap `_compute_loss`: begins `actor_update`, and records what the loss had and did."""

    @functools.wraps(function)
    def run(
        trainer: Trainer,
        model: object,
        inputs: Mapping[str, torch.Tensor],
        *args: object,
        **kwargs: object,
    ) -> object:
        found: Training | None = None
        with guarded("actor_update"):
            if training(trainer).is_training and _ROWS in inputs:
                found = training(trainer)
                found.in_loss = []
                found.update = found.stage("actor_update", microbatch=found.next_microbatch())
                found.update.begin()
        try:
            result = function(trainer, model, inputs, *args, **kwargs)
        finally:
            passes = None
            if found is not None:
                passes, found.in_loss = found.in_loss, None
        with guarded("what the loss did"):
            if found is not None and found.update is not None and passes:
                found.update.record(_update(trainer, inputs, passes[0]))
                found.update.log(loss=result.detach())
        return result

    return run


def _update(
    trainer: Trainer, inputs: Mapping[str, torch.Tensor], current: torch.Tensor
) -> dict[str, object]:
    """Return what one micro-batch of the update had: log-probs, weights, which tokens are cut."""
    old = inputs.get("old_per_token_logps")
    recorded = _tokens(trainer, inputs)
    weights = inputs.get("importance_sampling_ratio")
    if weights is not None:
        recorded["rollout_is_weights"] = weights.expand(current.shape)
    if old is None:
        # These weights sampled the tokens: TRL takes this pass for the one before the update, too.
        recorded["log_probs"] = current
        return recorded
    # The streams were recorded before the update; this pass is of weights that may have changed.
    del recorded["rollout_log_probs"]
    if trainer.loss_type in _CLIPPED_LOSSES:
        recorded["clipped"] = _clipped(trainer, current - old, recorded)
    return recorded


def _clipped(
    trainer: Trainer, log_ratio: torch.Tensor, recorded: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return -1 or 1 where the ratio is cut at its lower or upper bound, else 0, [rows, tokens]."""
    mask, advantages = recorded["response_mask"], recorded["advantages"]
    if trainer.importance_sampling_level == "sequence":
        mean = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
        log_ratio = mean.expand(log_ratio.shape)
    ratio = log_ratio.exp()
    low = (ratio < 1 - trainer.epsilon_low) & (advantages < 0)
    high = (ratio > 1 + trainer.epsilon_high) & (advantages > 0)
    return high.int() - low.int()


def wrap_training_step(function: Function) -> Function:
    """Wrap `training_step`: `actor_update` ends after the backward pass."""

    @functools.wraps(function)
    def run(trainer: Trainer, *args: object, **kwargs: object) -> object:
        error: BaseException | None = None
        step: int | None = None
        try:
            return function(trainer, *args, **kwargs)
        except BaseException as caught:
            error = caught
            raise
        finally:
            with guarded("the end of actor_update"):
                found = training(trainer)
                stage, found.update = found.update, None
                if stage is not None:
                    step = found.step
                    stage.end(error)
                if step is not None and error is None and not _makes_old(trainer):
                    found.want(step)

    return run


def wrap_log(function: Function) -> Function:
    """Wrap `log`: reports TRL's scalars, and adds the service's numbers under `stagescope/`."""

    @functools.wraps(function)
    def run(trainer: Trainer, logs: dict[str, float], *args: object, **kwargs: object) -> object:
        held: dict[str, list[float]] = {}
        is_training = False
        with guarded("scalars"):
            is_training = training(trainer).is_training and isinstance(logs, dict)
            if is_training:
                held = {name: [*values] for name, values in trainer._metrics["train"].items()}
                step = int(trainer.state.global_step)
                for name, value in training(trainer).numbers(step).items():
                    logs.setdefault(name, value)
        result = function(trainer, logs, *args, **kwargs)
        with guarded("scalars"):
            if is_training and trainer.accelerator.is_main_process:
                _report(training(trainer), int(trainer.state.global_step), logs, held)
        return result

    return run


def _report(
    found: Training, step: int, logs: Mapping[str, float], held: Mapping[str, list[float]]
) -> None:
    reported = scalars(logs, without=("epoch",))
    # TRL leaves every nan out of its means.
    for name, values in held.items():
        if not name.startswith(_MAY_BE_NAN) and any(math.isnan(value) for value in values):
            reported[name] = math.nan
    if step > 0 and reported:
        found.probe.log(step=step, **reported)
