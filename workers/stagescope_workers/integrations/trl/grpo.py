"""TRL's `GRPOTrainer`: stages, streams, samples and scalars of a training that does not change.

Steps are numbered as TRL logs them: the first is 1. The rollout's log-probs are those that its
generation returned (vLLM, or a `rollout_func`); generation by transformers returns none, and the
step says so. The trainer's come from the pass before the update where TRL makes one
(`actor_compute_log_prob`). Otherwise they come from the update's own forward passes
(`actor_update`): then all of them belong to the weights at the beginning of the step.

Read in TRL 1.16: `_generate_and_score_completions` returns the rows of a generation batch, which
are shuffled and divided into micro-batches together with a column of ours that names them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagescope_workers.integrations import canary, weights
from stagescope_workers.integrations.configuration import sampling
from stagescope_workers.integrations.patches import (
    Function,
    Patch,
    Wrap,
    after,
    guarded,
    running,
    staged,
    wrapper,
)
from stagescope_workers.integrations.training import one_a_trainer
from stagescope_workers.integrations.trl.training import TrlTraining, attaching_patches, cut
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    import torch

    from stagescope_workers.canary.after_syncs import WeightCanary

_MODULE: Final = "trl.trainer.grpo_trainer"
_ROWS: Final = "stagescope_rows"
"""The column that names the rows of a generation batch, [rows] int64 on the host."""
_REWARDS: Final = "stagescope_rewards"
"""The column of their rewards, [rows] on the host; nan where no function scored a completion."""
_CLIPPED_LOSSES: Final = ("grpo", "bnpo", "dr_grpo", "dapo")
"""The losses that cut a token's ratio at bounds, with TRL's own formula."""


def patches() -> list[Patch]:
    """Return the patches of `GRPOTrainer`; its subclasses inherit them."""
    calls: dict[str, tuple[Wrap, str]] = {
        "_generate_and_score_completions": (wrap_generation_batch, "streams and samples"),
        "_generate": (wrap_generate, "rollout_generate"),
        "_calculate_rewards": (wrap_rewards, "compute_rm_score and rewards"),
        "_get_per_token_logps_and_entropies": (
            wrap_forward, "actor_compute_log_prob, ref_compute_log_prob"
        ),
        "_compute_loss": (wrap_loss, "actor_update and what the loss did to each token"),
    }  # fmt: skip
    return [
        *(
            Patch(_MODULE, f"GRPOTrainer.{name}", wrap, purpose, since="1.0")
            for name, (wrap, purpose) in calls.items()
        ),
        *attaching_patches(_MODULE, "GRPOTrainer", training, since="1.0"),
    ]


Trainer: TypeAlias = Any
"""A `GRPOTrainer`. These attributes are read::

    ref_model, rollout_func, use_vllm, vllm_importance_sampling_correction, num_generations,
    num_iterations, beta, loss_type, importance_sampling_level, reward_weights, args,
    vllm_generation (mode, sync_weights, vllm_client), processing_class, temperature
"""


@dataclasses.dataclass
class _GenerationBatch:
    """The known facts of the generation batch that is being made.

    Attributes:
        step: The step that generates it.
        number: How many the step has made before.
        rewards: Rewards of this process's rows, [rows].
        stage: The stage of the trainer's log-probs, where TRL computes them before the update.
    """

    step: int
    number: int
    rewards: torch.Tensor | None = None
    stage: Stage | None = None


class Training(TrlTraining):
    """Reports one `GRPOTrainer`."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._batches: tuple[int, int] = (-1, 0)
        self.generating: _GenerationBatch | None = None
        self.in_loss: list[torch.Tensor] | None = None
        """The log-probs of the update's forward pass, while its loss is computed."""

    def statistics_settings(self) -> dict[str, object]:
        """Return which importance weights are applied."""
        trainer = self.trainer
        arguments = trainer.args
        if not (trainer.use_vllm and trainer.vllm_importance_sampling_correction):
            return {}
        if not weights.has(arguments, "vllm_importance_sampling_mode"):
            return weights.not_known("TRL", "vllm_importance_sampling_mode")
        mode = str(arguments.vllm_importance_sampling_mode)
        level, _, constraint = mode.partition("_")
        if level not in ("token", "sequence") or constraint not in ("truncate", "mask"):
            return weights.not_computed("TRL", f"its vllm_importance_sampling_mode is {mode}")
        return weights.applied(
            "TRL",
            "token" if level == "token" else "sequence",
            "cut" if constraint == "truncate" else "zero",
            low=getattr(arguments, "vllm_importance_sampling_clip_min", None),
            high=arguments.vllm_importance_sampling_clip_max,
        )

    @property
    def measures_update(self) -> bool:
        """Whether TRL makes no pass before the update, whose streams would be recorded."""
        return not _makes_old(self.trainer)

    def next_batch(self) -> _GenerationBatch:
        """Begin a generation batch of the step."""
        step, count = self._batches
        number = count if step == self.step else 0
        self._batches = (self.step, number + 1)
        self.generating = _GenerationBatch(self.step, number)
        return self.generating

    def attach_canary(self) -> None:
        """Have a vLLM server asked after each sync; an engine in this process is not asked."""
        generation: Any = getattr(self.trainer, "vllm_generation", None)
        if generation is not None and generation.mode == "server":
            generation.sync_weights = self._with_canary(generation.sync_weights)

    def _with_canary(self, sync: Function) -> Function:
        @functools.wraps(sync)
        def run(*args: object, **kwargs: object) -> object:
            with canary.around_sync(self.find_canary, after=self._ask_canary):
                return sync(*args, **kwargs)

        return run

    def _ask_canary(self, found: WeightCanary) -> None:
        """Ask the engine, and score on every rank: TRL syncs on all of them at the same place."""
        version, step = self.policy_version, self.step
        found.after_sync(version, step)
        found.score(version, self.trainer.model, step)

    @property
    def server_url(self) -> str | None:
        """The URL of its vLLM server; the main process alone has a client."""
        client = getattr(self.trainer.vllm_generation, "vllm_client", None)
        return None if client is None else str(client.base_url)

    def want(self, step: int, rows: int | None = None) -> None:
        """Request the step's numbers: complete with the samples of all processes."""
        if rows is None and self.trainer.accelerator.num_processes > 1:
            rows = self.trainer.args.generation_batch_size
        super().want(step, rows)


training: Final = one_a_trainer(Training)


def streams(trainer: Trainer, *, has_rollout: bool) -> dict[str, object]:
    """Return who produced the streams of a batch, and how its tokens were sampled."""
    if trainer.rollout_func is not None:
        engine = "rollout_func"
    else:
        engine = "vllm" if trainer.use_vllm else "transformers"
    own = {"producer": "trainer", "engine": "transformers"}
    rollout = {"producer": engine, "engine": engine, **sampling(trainer)}
    found: dict[str, object] = {"rollout": rollout} if has_rollout else {}
    return {"streams": {**found, "old": own, "current": own}}


def samples(trainer: Trainer, rows: torch.Tensor) -> dict[str, list[str]]:
    """Return the ids of the rows of a generation batch, by the column that names them."""
    size = int(trainer.num_generations)
    numbers = [int(row) for row in rows.tolist()]
    return {
        "sample_ids": [f"{row // size}-{row % size}" for row in numbers],
        "group_ids": [str(row // size) for row in numbers],
        "run_ids": [str(row % size) for row in numbers],
    }


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


@wrapper
def wrap_generation_batch(
    function: Function, trainer: Trainer, *args: Any, **kwargs: Any
) -> object:
    """Wrap `_generate_and_score_completions`: names its rows, and records what it returned."""
    with _generation(trainer) as batch:
        output = function(trainer, *args, **kwargs)
        if batch is not None:
            with guarded("streams and samples"):
                _record_batch(trainer, batch, output)
    return output


def _record_batch(
    trainer: Trainer, batch: _GenerationBatch, output: dict[str, torch.Tensor]
) -> None:
    import torch

    count = output["completion_ids"].size(0)
    accelerator = trainer.accelerator
    total = count * accelerator.num_processes
    first = batch.number * total + accelerator.process_index * count
    output[_ROWS] = torch.arange(first, first + count)
    if batch.rewards is not None:
        output[_REWARDS] = batch.rewards.detach().cpu()
    stage, batch.stage = batch.stage, None
    if stage is None:
        return
    recorded = {
        **_tokens(trainer, output),
        **_rows_of(output, "old_log_probs", "old_per_token_logps"),
        **_rows_of(output, "ref_log_probs", "ref_per_token_logps"),
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
        **_rows_of(inputs, "rewards", _REWARDS),
        **samples(trainer, inputs[_ROWS]),
        **streams(trainer, has_rollout=rollout is not None),
    }


def _rows_of(inputs: Mapping[str, torch.Tensor], name: str, theirs: str) -> dict[str, torch.Tensor]:
    return {} if inputs.get(theirs) is None else {name: inputs[theirs]}


def _by_token(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return values.unsqueeze(1).expand(mask.shape) if values.dim() == 1 else values


def _in_stage(name: str) -> Wrap:
    """Return a wrapper that runs a method as a stage of the batch that is being generated."""

    def make(trainer: Trainer, *args: object, **kwargs: object) -> Stage | None:
        found = training(trainer)
        batch = found.generating
        return None if batch is None else found.stage(name, occurrence=batch.number)

    return staged(name)(make)


wrap_generate = _in_stage("rollout_generate")


def wrap_rewards(function: Function) -> Function:
    """Wrap `_calculate_rewards`, which returns [rows of all processes, functions]."""
    return _with_rewards(_in_stage("compute_rm_score")(function))


@after("rewards")
def _with_rewards(rewards: torch.Tensor, trainer: Trainer, *args: object, **kwargs: object) -> None:
    batch = training(trainer).generating
    if batch is not None:
        weighted = rewards * trainer.reward_weights.to(rewards.device).unsqueeze(0)
        count = rewards.size(0) // trainer.accelerator.num_processes
        begin = trainer.accelerator.process_index * count
        # A completion that no function scored has no reward: nan, as in TRL's own log.
        total = weighted.nansum(dim=1)
        total[rewards.isnan().all(dim=1)] = math.nan
        batch.rewards = total[begin : begin + count]


@wrapper
def wrap_forward(
    function: Function, trainer: Trainer, model: object, *args: Any, **kwargs: Any
) -> object:
    """Wrap the forward pass: before the update it is a stage, within the loss it is the trainer's.

    The stage of the trainer's log-probs before the update has the streams. It stays open until the
    whole batch is known.
    """
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


def _is_reference(trainer: Trainer, model: object, batch: _GenerationBatch) -> bool:
    """Return whether a forward pass before the update is the reference's.

    If the reference has no model, it is the policy without its adapter. Its pass is then the second
    one, or the only one if the trainer's own pass is not made.
    """
    if trainer.ref_model is not None:
        return model is trainer.ref_model
    return trainer.beta != 0.0 and (batch.stage is not None or not _makes_old(trainer))


def _makes_old(trainer: Trainer) -> bool:
    every = trainer.args.steps_per_generation * trainer.num_iterations
    corrects = trainer.use_vllm and trainer.vllm_importance_sampling_correction
    return bool(trainer.args.gradient_accumulation_steps % every != 0 or corrects)


@wrapper
def wrap_loss(
    function: Function,
    trainer: Trainer,
    model: object,
    inputs: Mapping[str, torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> object:
    """Wrap `_compute_loss`: begins `actor_update`, and records what the loss had and did."""
    found: Training | None = None
    with guarded("actor_update"):
        if training(trainer).is_training and _ROWS in inputs:
            found = training(trainer)
            found.in_loss = []
            found.begin_update()
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


def _update(
    trainer: Trainer, inputs: Mapping[str, torch.Tensor], current: torch.Tensor
) -> dict[str, object]:
    """Return what one micro-batch of the update had: log-probs, weights, which tokens are cut."""
    old = inputs.get("old_per_token_logps")
    recorded = _tokens(trainer, inputs)
    applied = inputs.get("importance_sampling_ratio")
    if applied is not None:
        recorded["rollout_is_weights"] = applied.expand(current.shape)
    if old is None:
        # These weights sampled the tokens, so TRL also uses this pass as the one before the update.
        recorded["log_probs"] = current
        return recorded
    # The streams, groups and rewards were recorded before the update, perhaps in an earlier step:
    # a step may train a part of a group. This pass is of weights that may have changed.
    for name in ("rollout_log_probs", "rewards", "group_ids"):
        recorded.pop(name, None)  # generation by transformers has no log-probs
    if trainer.loss_type in _CLIPPED_LOSSES:
        mask, log_ratio = recorded["response_mask"], current - old
        if trainer.importance_sampling_level == "sequence":
            mean = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(
                min=1.0
            )
            log_ratio = mean.expand(log_ratio.shape)
        recorded["clipped"] = cut(trainer, log_ratio, recorded["advantages"])
    return recorded
