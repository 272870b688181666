"""OpenRLHF's `ActorPPOTrainer` on each DeepSpeed rank: streams, stages and scalars of the update.

Whole trainings of OpenRLHF 0.11.0 ran on CPU with it; 0.11.2 was read. A global step is one call
of `ppo_train`, numbered as OpenRLHF logs it. The first is 1, and later ones go on from the loaded
checkpoint. `critic.freezing_steps` without an actor's update are counted too.

Every tensor of an `Experience` is as wide as `action_mask`, one less than `sequences`: index t is
token t + 1. `action_log_probs` are the trainer's before the update. OpenRLHF's agents fill in
0.0 where the engine gave no log-prob. A stream that only has zeros is left out and named. Single
zeros are recorded, and the service names those that are far from the trainer's log-probs.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from stagescope_workers.integrations import canary, openrlhf_canary, weights
from stagescope_workers.integrations.configuration import (
    lookup,
    named_run,
    present,
    sampling,
    visible_leaves,
)
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
from stagescope_workers.integrations.training import (
    COLUMNS,
    FINISH_SECONDS,
    one_a_trainer,
    read_batch,
)
from stagescope_workers.probe.lifecycle import finish, init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    import torch

    from stagescope_workers.canary.after_syncs import WeightCanary


_ACTOR: Final = "openrlhf.trainer.ray.ppo_actor"
_STRATEGY: Final = "openrlhf.utils.deepspeed.deepspeed"
_ROLE_FOLDER: Final = "_actor"
"""The end of the path of the actor's checkpoint; the critic's has another."""


def patches() -> list[Patch]:
    """Return the patches of the actor's trainer, and of the strategy that loads a checkpoint."""
    hooks: list[tuple[str, str, Wrap, str]] = [
        (_ACTOR, "ActorPPOTrainer.ppo_train", wrap_ppo_train, "the number of a step"),
        (_ACTOR, "ActorPPOTrainer.training_step", wrap_training_step,
         "actor_update, streams and scalars"),
        (_ACTOR, "ActorPPOTrainer.broadcast_to_vllm", wrap_broadcast, "weight_sync"),
        (_STRATEGY, "DeepspeedStrategy.load_ckpt", wrap_load,
         "the step of the checkpoint that a training resumes"),
        (_STRATEGY, "DeepspeedStrategy.save_model", wrap_save, "the end of a training"),
    ]  # fmt: skip
    return [Patch(*hook, since="0.6") for hook in hooks]


Trainer: TypeAlias = Any
"""Attributes read from OpenRLHF's `ActorPPOTrainer`: args, actor, strategy."""
Experience: TypeAlias = Any
"""Attributes read from OpenRLHF's `Experience`: action_mask, action_log_probs (or None) and
rollout_log_probs are [rows, response tokens], sequences are prompts and responses."""


@dataclasses.dataclass
class Training:
    """Reports one `ActorPPOTrainer`.

    Attributes:
        resumed: The global step of the checkpoint, 0 without one.
        calls: How often `ppo_train` was called.
        epoch, minibatch: Numbers of the `training_step` that is running, or ran last.
        data_rank: The same number for ranks that hold the same rows.
    """

    resumed: int = 0
    calls: int = 0
    epoch: int = -1
    minibatch: int = -1
    probe: Probe | None = None
    data_rank: int = 0
    canary: WeightCanary | None = None

    def step(self, arguments: object) -> int:
        """Return the global step that is being trained, or was last."""
        frozen = lookup(arguments, "critic", "freezing_steps")
        first = max(self.resumed, (frozen if isinstance(frozen, int) else -1) + 1)
        return first + self.calls


_resumed: Final[weakref.WeakKeyDictionary[object, int]] = weakref.WeakKeyDictionary()
"""Strategy -> the global step of the actor's checkpoint that it loaded."""
_trainings: Final[weakref.WeakKeyDictionary[object, Training]] = weakref.WeakKeyDictionary()
"""Strategy -> the reports of the actor's trainer that uses it, once there is a probe."""


@one_a_trainer
def training(trainer: Trainer) -> Training:
    """Return what `trainer` reports."""
    return Training(resumed=_resumed.get(trainer.strategy, 0))


def probe_of(trainer: Trainer) -> Probe:
    """Return the probe of this rank, made at its first step."""
    found = training(trainer)
    if found.probe is None:
        import torch.distributed as dist

        arguments = trainer.strategy.args
        joined = dist.is_available() and dist.is_initialized()
        name = lookup(arguments, "logger", "wandb", "run_name") or "openrlhf"
        rank = dist.get_rank() if joined else 0
        data_rank = _data_rank(trainer.strategy)
        found.data_rank = rank if data_rank is None else data_rank
        found.probe = init(
            named_run(str(name), fallback="openrlhf"),
            role="actor",
            rank=rank,
            world_size=dist.get_world_size() if joined else 1,
            data_rank=data_rank,
            layout={"framework": "openrlhf"},
            settings={**statistics_settings(arguments), "openrlhf": settings(arguments)},
            resumed_from_step=found.resumed or None,
        )
        _trainings[trainer.strategy] = found
    return found.probe


def _data_rank(strategy: object) -> int | None:
    """Return the data-parallel rank: ranks of ring attention and TP hold the same rows."""
    mesh = getattr(strategy, "ds_device_mesh", None)
    try:
        return None if mesh is None else int(mesh["dp"].get_local_rank())
    except Exception:  # a mesh without that dimension, or without a process group
        return None


def settings(arguments: object) -> dict[str, object]:
    """Return OpenRLHF's arguments, namespaces in a namespace, without what may be secret."""
    return visible_leaves(_tree(arguments))


def _tree(node: object) -> dict[object, object]:
    return {
        name: _tree(value) if hasattr(value, "__dict__") else value
        for name, value in vars(node).items()
        if isinstance(value, str | int | float | bool | list | tuple | None)
        or hasattr(value, "__dict__")
    }


@dataclasses.dataclass(frozen=True)
class Correction:
    """OpenRLHF's importance correction, by the names of 0.11.2.

    Attributes:
        level: Whether the gate reads each token, or the mean of a sequence.
        mode: Whether a weight beyond the bounds is set to 0, or cut to the bound.
        gating: The quantity that the gate reads: the weight itself, or a divergence of the
            token's two probabilities.
        low, high: The bounds of that quantity.
    """

    level: str
    mode: str
    gating: str
    low: float
    high: float


_OLDER: Final = {
    "tis": ("token", "clip"), "icepop": ("token", "mask"), "seq-mask-tis": ("seq", "mask")
}  # fmt: skip
"""`is_correction_type` until 0.11.1 -> level and mode."""


def correction(arguments: object) -> Correction | Literal["off", "unknown"]:
    """Return the correction that the loss applies; 'unknown' where no known option tells."""
    options = lookup(arguments, "algo", "advantage")
    if weights.has(options, "is_correction_level"):
        level = str(lookup(options, "is_correction_level"))
        mode = str(lookup(options, "is_correction_mode"))
        gating = str(lookup(options, "is_correction_gating"))
    elif weights.has(options, "is_correction_enable"):
        kind = str(lookup(options, "is_correction_type"))
        known = _OLDER.get(kind, (kind, kind))
        level, mode = known if lookup(options, "is_correction_enable") else ("off", "off")
        gating = "ratio"
    else:
        return "unknown"
    if level == "off" or lookup(arguments, "actor", "policy_loss_type") not in (None, "ppo"):
        return "off"
    bounds = lookup(options, "is_correction_threshold")
    if not isinstance(bounds, list | tuple) or len(bounds) not in (1, 2):
        return "unknown"
    low = float(bounds[0]) if len(bounds) == 2 else 0.0
    return Correction(level, mode, gating, low, float(bounds[-1]))


def statistics_settings(arguments: object) -> dict[str, object]:
    """Return the settings that the statistics depend on: which importance weights are applied."""
    found = correction(arguments)
    if found == "off":
        return {}
    if found == "unknown":
        return weights.not_known(
            "OpenRLHF", "algo.advantage.is_correction_level", "is_correction_enable"
        )
    if (found.level, found.gating) == ("token", "ratio") and found.mode in ("clip", "mask"):
        outside: weights.Outside = "cut" if found.mode == "clip" else "zero"
        return weights.applied("OpenRLHF", "token", outside, low=found.low, high=found.high)
    return weights.not_computed(
        "OpenRLHF",
        f"its loss drops tokens by {found.gating} of each {found.level} (mode {found.mode})",
    )


def applied_weights(
    found: Correction, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor | None:
    """Return the loss's weight of each token, [rows, tokens].

    None where the correction has a form that is not known.
    """
    log_ratio = (old - rollout).detach()
    ratio = log_ratio.exp()
    if found.gating == "ratio":
        gated = log_ratio
    elif found.gating in ("binary_kl", "tv"):
        p, q = (each.detach().exp().clamp(1e-6, 1 - 1e-6) for each in (rollout, old))
        of_token = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        gated = of_token if found.gating == "binary_kl" else (p - q).abs()
    else:
        return None
    if found.level == "seq":
        count = mask.sum(-1, keepdim=True).clamp(min=1)
        gated = (gated * mask).sum(-1, keepdim=True) / count
    elif found.level != "token":
        return None
    if found.gating == "ratio":
        gated = gated.exp()
    if found.mode == "clip":
        return gated.clamp(min=found.low, max=found.high).expand(ratio.shape)
    if found.mode != "mask":
        return None
    return ratio.where((gated >= found.low) & (gated <= found.high), ratio.new_zeros(()))


@after("the step of a checkpoint")
def wrap_load(
    result: Any, strategy: object, model: object, load_dir: object, *args: Any, **kwargs: Any
) -> None:
    """Wrap `load_ckpt`, which returns the path and the client's states."""
    states = result[1]
    if str(load_dir).rstrip("/").endswith(_ROLE_FOLDER) and states:
        _resumed[strategy] = int(states.get("global_step", 0))


@after("the end of a training")
def wrap_save(
    result: object,
    strategy: Any,
    model: object,
    tokenizer: object,
    output_dir: object,
    *args: object,
    **kwargs: object,
) -> None:
    """Wrap `save_model`: the model is saved into `ckpt.output_dir` once, after the last step.

    Ray ends the ranks right after it, with what they have not sent yet.
    """
    found = _trainings.get(strategy)
    if found is None or found.probe is None:
        return
    if output_dir == lookup(strategy.args, "ckpt", "output_dir"):
        if found.canary is not None:
            found.canary.before_sync("the training ended")
        finish(FINISH_SECONDS, run=found.probe.run)


@wrapper
def wrap_ppo_train(function: Function, trainer: Trainer, *args: Any, **kwargs: Any) -> object:
    """Wrap `ppo_train`: a global step of this rank."""
    with guarded("the number of a step"):
        found = training(trainer)
        found.calls += 1
        found.epoch = found.minibatch = -1
    result = function(trainer, *args, **kwargs)
    with guarded("the scalars of a step"):
        found = training(trainer)
        if found.probe is not None and found.probe.rank == 0 and isinstance(result, Mapping):
            found.probe.log(step=found.step(trainer.args), **_numbers(result))
    return result


@wrapper
def wrap_training_step(
    function: Function,
    trainer: Trainer,
    experience: Experience,
    kl_ctl: object,
    step: int,
    *args: Any,
    **kwargs: Any,
) -> object:
    """Wrap `training_step`: a micro-batch of `actor_update`; the first epoch has the streams."""
    stage: Stage | None = None
    with guarded("actor_update"):
        found = training(trainer)
        number = int(step)
        found.epoch += number <= found.minibatch or found.epoch < 0
        found.minibatch = number
        stage = probe_of(trainer).stage(
            "actor_update",
            step=found.step(trainer.args),
            policy_version=found.step(trainer.args) - 1,
            model=getattr(trainer.actor, "model", trainer.actor),
            epoch=found.epoch,
            microbatch=number,
        )
    with running(stage):
        with guarded("streams and samples"):
            # Later epochs train on the same samples: their tokens count once.
            if training(trainer).epoch == 0 and stage is not None:
                names = samples(training(trainer), experience)
                stage.record({**recorded(experience, trainer.args), **names})
        result = function(trainer, experience, kl_ctl, step, *args, **kwargs)
        with guarded("scalars"):
            if stage is not None:
                stage.log(**_numbers(result["metrics"]))
    return result


def recorded(experience: Experience, arguments: object) -> dict[str, object]:
    """Return what a micro-batch of experience has, by the names of `Stage.record`."""
    columns = {name: getattr(experience, name, None) for name in COLUMNS["openrlhf"]}
    found = read_batch(present(columns), "openrlhf")
    mask = experience.action_mask
    found["responses"] = experience.sequences[:, -mask.shape[1] :]
    if "rollout_log_probs" in found and experience.action_log_probs is not None:
        how = correction(arguments)
        if isinstance(how, Correction):
            applied = applied_weights(
                how, experience.action_log_probs, experience.rollout_log_probs, mask
            )
            if applied is not None:
                found["rollout_is_weights"] = applied
    rewards = getattr(experience, "rewards", None)
    if rewards is not None and rewards.dim() == 1:
        found["rewards"] = rewards
    prompts = getattr(experience, "prompts", None)
    if prompts and len(prompts) == mask.shape[0]:
        found["group_ids"] = found["prompt_hashes"] = [_prompt_id(prompt) for prompt in prompts]
    own = {"producer": "trainer", "engine": "deepspeed"}
    streams: dict[str, object] = {"old": own}
    if "rollout_log_probs" in found:
        streams["rollout"] = {
            "producer": "vllm",
            "engine": "vllm",
            **sampling(lookup(arguments, "rollout")),
        }
    found["streams"] = streams
    return found


def samples(found: Training, experience: Experience) -> dict[str, list[str]]:
    """Return ids of a micro-batch's rows; ranks that hold the same rows agree."""
    rows = range(experience.action_mask.shape[0])
    return {"sample_ids": [f"{found.data_rank}-{found.minibatch}-{row}" for row in rows]}


def _prompt_id(prompt: object) -> str:
    import hashlib

    text = str(prompt).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=6).hexdigest()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics that are one number; metrics of each sample are tensors instead."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float) or (hasattr(value, "dim") and value.dim() == 0):
            found[name] = value
    return found


def wrap_broadcast(function: Function) -> Function:
    """Wrap `broadcast_to_vllm`: `weight_sync` of the step that was trained last, and its canary."""
    return _with_canary(_in_sync(function))


@staged("weight_sync")
def _in_sync(trainer: Trainer, *args: object, **kwargs: object) -> Stage | None:
    found = training(trainer)
    # Before the first step the weights of a checkpoint are sent.
    if not found.calls or found.probe is None:
        return None
    return found.probe.stage("weight_sync", step=found.step(trainer.args))


@wrapper
def _with_canary(function: Function, trainer: Trainer, *args: object, **kwargs: object) -> object:
    found = None if canary.every() is None else training(trainer)
    if found is None or not found.calls or found.probe is None:
        return function(trainer, *args, **kwargs)
    step = found.step(trainer.args)
    with openrlhf_canary.around(found, trainer, found.probe, step):
        return function(trainer, *args, **kwargs)
