"""NeMo-RL's GRPO and PPO on their driver: streams, stages and scalars of each step.

Read in NeMo-RL 0.6.0 (its tag, and main of 2026-08-22, which states it) and 0.7.0. The driver has
both streams where it computes the error of each sequence:
`compute_and_apply_seq_logprob_error_masking`, which the algorithms call by the name that they
imported from `grpo`. The batch is recorded as it was before that call, which masks the sequences
that differ most. Index t of every tensor is token t, and no loss counts the first token of a
sequence.

With `force_on_policy_ratio` NeMo-RL makes no pass before the update, fills `prev_logprobs` with
zeros, and leaves the call out. The rollout's stream is then read from the step's line in NeMo-RL's
own log, `train_data_step{N}.jsonl`, and the step says that it is not measured. The PPO of 0.7.0
has neither that call nor that line. There the batch is that of its first update.

Steps are numbered as in NeMo-RL's log: the first is 1.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from stagescope_wire.tensors import ROUTES_REFUSED
from stagescope_workers.integrations import weights
from stagescope_workers.integrations.configuration import (
    lookup,
    named_run,
    sampling,
    visible_leaves,
)
from stagescope_workers.integrations.patches import Function, Patch, Wrap, guarded, staged, wrapper
from stagescope_workers.integrations.training import (
    behind_masked,
    close_probe,
    closed_at_end,
    read_batch,
    scalars,
)
from stagescope_workers.probe.lifecycle import init
from stagescope_workers.probe.probe import Probe
from stagescope_workers.probe.stage import Stage

if TYPE_CHECKING:
    import torch

_GRPO: Final = "nemo_rl.algorithms.grpo"
_SYNC: Final = "nemo_rl.algorithms.grpo_sync"
_PPO: Final = "nemo_rl.algorithms.ppo"
_POLICY: Final = "nemo_rl.models.policy.lm_policy"
_LOGGER: Final = "nemo_rl.utils.logger"
_LOG_FILE: Final = re.compile(r"train_data_step(\d+)\.jsonl\Z")
_TRAIN: Final = "train"
_STAGES: Final = {
    "get_logprobs": "actor_compute_log_prob",
    "get_reference_policy_logprobs": "ref_compute_log_prob",
}
"""Methods of `Policy`, called on the driver."""
_UPDATE: Final = "actor_update"
NOT_COMPUTED: Final = (
    "NeMo-RL computes no prev_logprobs with force_on_policy_ratio, and fills them with zeros: the "
    "mismatch is not measured"
)


def patches() -> list[Patch]:
    """Return the patches of the algorithms, of the policy and of the logger."""
    algorithms = [
        (_GRPO, "grpo_train"), (_GRPO, "async_grpo_train"), (_SYNC, "grpo_train_sync"),
        (_PPO, "ppo_train"), (_PPO, "async_ppo_train"),
    ]  # fmt: skip
    purpose = "the first step of a training, and its end"
    hooks: list[tuple[str, str, Wrap, str, str]] = [
        *((module, name, wrap_algorithm, purpose, "") for module, name in algorithms),
        (_GRPO, "compute_and_apply_seq_logprob_error_masking", wrap_masking,
         "streams of both sides", "0.5"),
        *((_POLICY, f"Policy.{name}", _in_stage(stage), stage, "")
          for name, stage in _STAGES.items()),
        (_POLICY, "Policy.train", wrap_train, _UPDATE, ""),
        (_LOGGER, "Logger.log_metrics", wrap_log_metrics,
         "scalars and the number of a step", ""),
        (_LOGGER, "Logger.log_batched_dict_as_jsonl", wrap_log_file,
         "the rollout's stream of steps without prev_logprobs", ""),
    ]  # fmt: skip
    return [
        Patch(module, path, wrap, purpose, since=since)
        for module, path, wrap, purpose, since in hooks
    ]


@dataclasses.dataclass
class Training:
    """The training of this process; a driver runs one at a time.

    Attributes:
        probe: The probe of this process, from the training's start to its end.
        step: The step that is worked on.
        recorded: The last step whose streams were recorded.
        settings: Settings of the generation.
    """

    probe: Probe | None = None
    step: int = 1
    recorded: int = 0
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def open_stage(self, name: str) -> Stage | None:
        """Return a stage of the step that is worked on; None outside a training."""
        if self.probe is None:
            return None
        return self.probe.stage(name, step=self.step, policy_version=self.step - 1)


_training: Final = Training()


def _begin(function: Function, given: Mapping[str, Any]) -> None:
    config = given.get("master_config")
    saved = next((value for name, value in given.items() if name.endswith("_save_state")), None)
    counts = [lookup(saved, name) for name in ("total_steps", "current_step")]
    # The asynchronous algorithm counts `current_step` alone, over all epochs.
    is_async = function.__name__.startswith("async")
    done = int(counts[1 if is_async or counts[0] is None else 0] or 0)
    log_dir = str(lookup(config, "logger", "log_dir") or "nemo-rl")
    name = lookup(config, "logger", "wandb", "name") or log_dir.rstrip("/").split("/")[-1]
    _training.step, _training.recorded = done + 1, 0
    _training.settings = lookup(config, "policy", "generation") or {}
    _training.probe = init(
        named_run(str(name), fallback="nemo-rl"),
        role="driver",
        rank=0,
        world_size=1,
        layout={"framework": "nemo_rl"},
        settings={**statistics_settings(config), "nemo_rl": settings(config)},
        resumed_from_step=done or None,
        captures="NeMo-RL's models run in workers of their own, which do not report",
    )


def _end(error: BaseException | None) -> None:
    probe, _training.probe = _training.probe, None
    close_probe(probe, error)


@wrapper
def wrap_algorithm(function: Function, *args: object, **kwargs: object) -> object:
    """Wrap a training's function: the configuration and the saved state are arguments of it."""
    with guarded("the start of a training"):
        _begin(function, _given(function, args, kwargs))
    with closed_at_end(_end):
        return function(*args, **kwargs)


def settings(config: Any) -> dict[str, object]:
    """Return NeMo-RL's configuration (a pydantic model, or dicts) without what may be secret."""
    tree = config.model_dump() if hasattr(config, "model_dump") else config
    return visible_leaves(tree) if isinstance(tree, Mapping) else {}


def statistics_settings(config: object) -> dict[str, object]:
    """Return the settings that the statistics depend on: which importance weights are applied."""
    loss = lookup(config, "loss_fn")
    if not weights.has(loss, "use_importance_sampling_correction"):
        return weights.not_known("NeMo-RL", "loss_fn.use_importance_sampling_correction")
    if not lookup(loss, "use_importance_sampling_correction"):
        return {}
    low, high = (lookup(loss, f"truncated_importance_sampling_ratio{end}") for end in ("_min", ""))
    kind = lookup(loss, "truncated_importance_sampling_type") or "tis"
    if lookup(loss, "sequence_level_importance_ratios"):
        return weights.not_computed("NeMo-RL", "it sets sequence_level_importance_ratios")
    if high is None:
        return weights.applied("NeMo-RL", "token", "cut", low=None, high=None)
    if kind not in ("tis", "icepop"):
        return weights.not_computed("NeMo-RL", f"its truncated_importance_sampling_type is {kind}")
    outside: weights.Outside = "cut" if kind == "tis" else "zero"
    return weights.applied("NeMo-RL", "token", outside, low=low, high=high)


def _in_stage(name: str) -> Wrap:
    """Return a wrapper that runs a method of the policy as a stage."""
    return staged(name)(lambda *args, **kwargs: _training.open_stage(name))


def _given(function: Function, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """Return the arguments of a call by name."""
    return inspect.signature(function).bind(*args, **kwargs).arguments


def wrap_train(function: Function) -> Function:
    """Wrap the update: its batch is recorded where no call before it gave the step's."""
    return _recorded(_in_stage(_UPDATE)(function))


@wrapper
def _recorded(function: Function, *args: object, **kwargs: object) -> object:
    with guarded("streams of both sides"):
        data = _given(function, args, kwargs)["data"]
        if _training.recorded != _training.step and _has_both(data):
            record(data, data.get("rewards"))
    return function(*args, **kwargs)


def _has_both(data: Any) -> bool:
    """Return whether a batch has both streams; zeros mean that the pass was not made."""
    if not isinstance(data, Mapping) or "generation_logprobs" not in data:
        return False
    return "prev_logprobs" in data and bool(data["prev_logprobs"].any())


@wrapper
def wrap_masking(function: Function, *args: object, **kwargs: object) -> object:
    """Wrap the masking of sequences: before it no sequence is masked for its error."""
    with guarded("streams of both sides"):
        given = _given(function, args, kwargs)
        record(given["train_data"], given.get("rewards"))
    result = function(*args, **kwargs)
    with guarded("the errors of sequences"):
        if _training.probe is not None:
            _training.probe.log(step=_training.step, **scalars(result))
    return result


def record(data: Mapping[str, torch.Tensor], rewards: torch.Tensor | None = None) -> None:
    """Record a batch in its own stage, separate from the pass that computed its log-probs."""
    # Index 0 is a token that no logits score.
    names = ("input_ids", "token_ids", "generation_logprobs", "prev_logprobs",
             "reference_policy_logprobs", "advantages")  # fmt: skip
    mask = data["token_mask"]
    mask = mask * data["sample_mask"].to(mask.dtype).unsqueeze(-1)
    columns = {name: data[name] for name in names if name in data}
    columns = {
        name: values[:, 1:] for name, values in columns.items() if values.shape == mask.shape
    }
    routes = data.get("routed_experts")
    stage = _training.open_stage("actor_compute_log_prob")
    if stage is None:
        return
    found = read_batch({**columns, "token_mask": mask[:, 1:]}, "nemo_rl")
    if "old_log_probs" not in found:
        found["left_out"] = {"old_log_probs": NOT_COMPUTED}
    if routes is not None and tuple(routes.shape[:2]) == tuple(mask.shape):
        found["rollout_routed_experts"] = behind_masked(routes[:, :-1])
    elif routes is not None:
        found[ROUTES_REFUSED] = f"routed_experts is {[*routes.shape]} for a batch {[*mask.shape]}"
    if rewards is not None and rewards.numel() == mask.shape[0]:
        found["rewards"] = rewards.reshape(-1)
    engine = str(lookup(_training.settings, "backend") or "generation")
    rollout = {"producer": engine, "engine": engine, **sampling(_training.settings)}
    streams: dict[str, object] = {"rollout": rollout}
    if "old_log_probs" in found:
        streams["old"] = {"producer": "policy"}
    found["streams"] = streams
    stage.begin()
    stage.record(found)
    stage.end()
    _training.recorded = _training.step


@wrapper
def wrap_log_metrics(function: Function, *args: object, **kwargs: object) -> object:
    """Wrap `log_metrics`: `train` has the scalars of a step, `timing/train` ends it."""
    given: Mapping[str, Any] = {}
    with guarded("scalars"):
        given = _given(function, args, kwargs)
        prefix, metrics = given.get("prefix"), given["metrics"]
        if _training.probe is not None and prefix == _TRAIN and isinstance(metrics, Mapping):
            _training.step = int(given["step"])
            _training.probe.log(step=_training.step, **scalars(metrics))
    result = function(*args, **kwargs)
    with guarded("the end of a step"):
        if _training.probe is not None and given.get("step_finished"):
            _training.step = int(given["step"]) + 1
    return result


@wrapper
def wrap_log_file(function: Function, *args: object, **kwargs: object) -> object:
    """Wrap the log of a step's batch: it has the step's number, also where no pass was made."""
    with guarded("the log of a batch"):
        given = _given(function, args, kwargs)
        match = _LOG_FILE.search(str(given["filename"]))
        if match is not None and _training.probe is not None:
            _log_batch(int(match[1]), given["to_log"])
    return function(*args, **kwargs)


def _log_batch(step: int, logged: Mapping[str, object]) -> None:
    _training.step = step
    if _training.recorded == step or "generation_logprobs" not in logged:
        return
    import torch

    names = {
        "token_ids": "input_ids", "token_loss_mask": "token_mask",
        "sample_loss_mask": "sample_mask", "generation_logprobs": "generation_logprobs",
        "prev_logprobs": "prev_logprobs", "advantages": "advantages",
    }  # fmt: skip
    data = {
        ours: torch.as_tensor(logged[theirs]) for theirs, ours in names.items() if theirs in logged
    }
    rewards = logged.get("filtered_rewards", logged.get("rewards"))
    record(data, None if rewards is None else torch.as_tensor(rewards))
