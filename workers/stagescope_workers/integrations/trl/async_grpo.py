"""TRL's `AsyncGRPOTrainer`: streams, staleness, samples and scalars of its update.

Its rollouts come from a worker process that constantly samples from a vLLM server; the trainer
drains its queue. The rollout's log-probs come with the samples. The trainer's come from the
update's own forward pass. TRL hands over neither the completion's group nor the version of the
weights that sampled it. Columns of ours carry both from the main process, which packs the
micro-batches, to the ranks that train them.

Read in TRL 1.16: `compute_loss` has its loss terms packed, completion after completion, one term
for each token that the model sampled. Tokens of tools and environments are not among them. So a
gap in a completion's positions is the end of a round. A conversation that forked is
several completions of its group. Versions count weight syncs: version 1 are the weights that the
training began with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stagescope_workers.integrations import canary
from stagescope_workers.integrations.configuration import sampling
from stagescope_workers.integrations.patches import (
    Function,
    Patch,
    Wrap,
    after,
    guarded,
    staged,
    wrapper,
)
from stagescope_workers.integrations.training import one_a_trainer
from stagescope_workers.integrations.trl.training import TrlTraining, attaching_patches, cut
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

    from stagescope_workers.canary.after_syncs import WeightCanary

_MODULE: Final = "trl.experimental.async_grpo.async_grpo_trainer"
_SAMPLES: Final = "stagescope_samples"
"""The column that names the completions of each rank's row, [ranks, completions, 4] int64.

The four numbers are group, number in the group, version that sampled the completion, and the main
process's version minus its weight syncs. They are -1 where a rank has fewer completions."""
_REWARDS: Final = "stagescope_rewards"
"""Their rewards, [ranks, completions] float32; nan where no function scored a completion."""
_VERSION: Final = "stagescope_version"
_OFFSET: Final = "stagescope_offset"


def patches() -> list[Patch]:
    """Return the patches of `AsyncGRPOTrainer`, and of the code that packs its micro-batches."""
    calls: dict[str, tuple[Wrap, str]] = {
        "AsyncGRPOTrainer.compute_loss": (
            wrap_loss, "actor_update, streams, and what the loss did to each token"
        ),
        "AsyncGRPOTrainer._sync_weight": (wrap_sync, "weight_sync and versions"),
        "AsyncGRPOTrainer.get_train_dataloader": (wrap_dataloader, "staleness"),
        "RolloutQueueDataset.__iter__": (wrap_queue, "staleness"),
        "DataCollatorForRollout.torch_call": (wrap_collator, "samples, rewards and staleness"),
    }  # fmt: skip
    return [
        *(
            Patch(_MODULE, path, wrap, f"asynchronous GRPO: {purpose}", since="1.16")
            for path, (wrap, purpose) in calls.items()
        ),
        *attaching_patches(_MODULE, "AsyncGRPOTrainer", training, since="1.16"),
    ]


Dataset: TypeAlias = Any
"""Attributes read from `RolloutQueueDataset`, and added to it: queue (get), model_version_fn,
stagescope_syncs."""
Trainer: TypeAlias = Any
"""Attributes read from `AsyncGRPOTrainer`: rollout_worker, _rollout_dataset, accelerator, args
(vllm_server_base_url), model_version, _lora_sync, _lora_name."""


class Training(TrlTraining):
    """Reports one `AsyncGRPOTrainer`."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.syncs = 0
        """Weight syncs in this process; every process takes part in each."""
        self.offset = 0
        """The version of the weights before the first of them, of a resumed training."""

    def statistics_settings(self) -> dict[str, object]:
        """Return nothing: TRL applies no importance weights except the ratio of the loss."""
        return {}

    @property
    def policy_version(self) -> int:
        """The version of the weights, which only the main process's trainer knows."""
        return self.offset + self.syncs

    @property
    def server_url(self) -> str | None:
        """The URL of its vLLM server, which the main process asks."""
        trainer = self.trainer
        is_main = trainer.accelerator.is_main_process
        return str(trainer.args.vllm_server_base_url) if is_main else None

    def ask_canary(self, found: WeightCanary) -> None:
        """Ask the engine alone: the trainer's attention accepts nothing but TRL's packed trees."""
        trainer = self.trainer
        adapter = None  # where TRL sends adapters instead of weights, each version has its own
        if getattr(trainer, "_lora_sync", False):
            adapter = f"{trainer._lora_name}-v{trainer.model_version}"
        found.after_sync(self.policy_version, self.last_step, adapter=adapter)

    def want(self, step: int, rows: int | None = None) -> None:
        """Request the step's numbers; how many completions other processes have is not known."""
        if self.trainer.accelerator.num_processes == 1:
            super().want(step, rows)


training: Final = one_a_trainer(Training)


class _Tap:
    """A rollout queue that remembers the last sample that was read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.last: Any = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._queue, name)

    def get(self, *args: object, **kwargs: object) -> Any:
        self.last = self._queue.get(*args, **kwargs)
        return self.last


@after("staleness")
def wrap_dataloader(loader: object, trainer: Trainer, *args: object, **kwargs: object) -> None:
    """Wrap `get_train_dataloader`: the rollout dataset knows what reports its trainer."""
    # None but in the main process, which alone reads the queue.
    if trainer._rollout_dataset is not None:
        found = training(trainer)
        trainer._rollout_dataset.stagescope_syncs = lambda: found.syncs


@wrapper
def wrap_queue(function: Function, dataset: Dataset) -> Iterator[object]:
    """Wrap `RolloutQueueDataset.__iter__`: each sample keeps the version that sampled it."""
    tap = _Tap(dataset.queue)
    with guarded("staleness"):
        dataset.queue = tap
    for item in function(dataset):
        with guarded("staleness"):
            assert tap.last is not None
            item[_VERSION] = int(tap.last.model_version)
            item[_OFFSET] = int(dataset.model_version_fn()) - dataset.stagescope_syncs()
        yield item


@after("samples")
def wrap_collator(
    batch: dict[str, object], collator: object, examples: Any, *args: object, **kwargs: object
) -> None:
    """Wrap `torch_call`, which packs a micro-batch: adds the columns that name its completions."""
    numbers = vars(collator).setdefault("stagescope_numbers", {})
    batch |= _named([row.samples for row in examples[0]], numbers)


def _named(
    rows: Sequence[Sequence[Mapping[str, Any]]], numbers: dict[int, int]
) -> dict[str, torch.Tensor]:
    import torch

    width = max(map(len, rows))
    named = torch.full((len(rows), width, 4), -1, dtype=torch.int64)
    rewards = torch.full((len(rows), width), torch.nan)
    for row, samples in enumerate(rows):
        for column, sample in enumerate(samples):
            group = int(sample["group_id"])
            number = numbers[group] = numbers.get(group, -1) + 1
            named[row, column] = torch.tensor([group, number, sample[_VERSION], sample[_OFFSET]])
            rewards[row, column] = sample["metrics"].get("reward", torch.nan)
    return {_SAMPLES: named, _REWARDS: rewards}


def wrap_sync(function: Function) -> Function:
    """Wrap `_sync_weight`: `weight_sync` of the step that was trained last, and its canary."""
    return _with_canary(_counted(_in_sync(function)))


@wrapper
def _with_canary(function: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    found = training(trainer)
    with canary.around_sync(found.find_canary, after=found.ask_canary):
        return function(trainer, *args, **kwargs)


@staged("weight_sync")
def _in_sync(trainer: Trainer, *args: object, **kwargs: object) -> Stage | None:
    found = training(trainer)
    # Before the first step the weights that the training begins with are sent.
    if found.last_step is None or not found.syncs:
        return None
    return found.probe.stage("weight_sync", step=found.last_step)


@after("weight_sync")
def _counted(result: object, trainer: Trainer, *args: object, **kwargs: object) -> None:
    training(trainer).syncs += 1


@wrapper
def wrap_loss(
    function: Function,
    trainer: Trainer,
    model: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> object:
    """Wrap `compute_loss`: begins `actor_update`, and records what the loss had and did."""
    found: Training | None = None
    passes: list[torch.Tensor] = []
    hook: RemovableHandle | None = None
    with guarded("actor_update"):
        if training(trainer).is_training and _SAMPLES in inputs:
            found = training(trainer)
            found.offset = int(inputs[_SAMPLES][0, 0, 3])
            found.begin_update()
            hook = model.register_forward_hook(
                lambda module, arguments, output: passes.append(output.log_probs.detach())
            )
    try:
        result = function(trainer, model, inputs, *args, **kwargs)
    finally:
        if hook is not None:
            hook.remove()
    with guarded("what the loss did"):
        if found is not None and found.update is not None and passes:
            found.update.record(recorded(trainer, inputs, passes[0]))
            found.update.log(loss=result.detach())
    return result


def recorded(
    trainer: Trainer, inputs: Mapping[str, torch.Tensor], log_probs: torch.Tensor
) -> dict[str, object]:
    """Return the tensors of a micro-batch, by the names of `Stage.record`, packed.

    Args:
        trainer: TRL's.
        inputs: Inputs of this rank, as `compute_loss` has them.
        log_probs: Log-probs of the forward pass, one for each packed token.
    """
    import torch

    kept = inputs["attention_mask"].bool()
    terms = inputs["token_index"] >= 0
    index, segment = inputs["token_index"][terms], inputs["segment_id"][terms]
    old, advantages = inputs["old_log_probs"][terms], inputs["advantages"][terms]
    # A token is predicted at the position before its own.
    positions = inputs["position_ids"][kept][index] + 1
    samples = inputs[_SAMPLES][0]
    named = samples[samples[:, 0] >= 0].tolist()
    lengths = torch.bincount(segment, minlength=len(named))
    current = log_probs.flatten()[index]
    own = {"producer": "trainer", "engine": "transformers"}
    return {
        "cu_seqlens": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        "responses": inputs["shift_labels"][kept][index],
        "response_mask": torch.ones_like(segment),
        "rollout_log_probs": old,
        "log_probs": current,
        "advantages": advantages,
        "clipped": cut(trainer, current - old, advantages),
        "positions": positions,
        "round_ids": _rounds(segment, positions),
        "versions": torch.tensor([version for _, _, version, _ in named]),
        "rewards": inputs[_REWARDS][0, : len(named)],
        "sample_ids": [f"{group}-{number}" for group, number, _, _ in named],
        "group_ids": [str(group) for group, _, _, _ in named],
        "run_ids": [str(number) for _, number, _, _ in named],
        "streams": {"rollout": _rollout(trainer), "current": own},
    }


def _rounds(segment: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the round of each token in its completion: the positions of one are contiguous."""
    import torch

    first = torch.ones_like(segment, dtype=torch.bool)
    first[1:] = segment[1:] != segment[:-1]
    begins = first.clone()
    begins[1:] |= positions[1:] != positions[:-1] + 1
    total = begins.cumsum(0) - 1
    # How many rounds the completions before have.
    return total - total[first][first.cumsum(0) - 1]


def _rollout(trainer: Trainer) -> dict[str, object]:
    """Return who sampled the completions, and how: a worker of the user's own is named."""
    worker = type(trainer.rollout_worker).__name__
    is_own = worker in ("AsyncRolloutWorker", "NoneType")
    engine = "vllm" if is_own else worker
    return {"producer": engine, "engine": engine, **sampling(trainer.args)}
