"""Other trainers' names: of their batches on the way in, of their metrics on the way out.

::

    stage.record(read_batch(rollout_batch, "areal"))
    wandb.log(rename_metrics(numbers, "openrlhf"), step=step)

A trainer's tensors are response-only (slime: lists of rows), or as wide as the whole sequence
(AReaL, NexRL, NeMo-RL), and some name token t's log-prob at t - 1 (AReaL after it has rolled them).
`read_batch` keeps the trainer's alignment where all of its tensors share one, and aligns what does
not. Names and alignments are those of `facts` that docs/trainers.md lists by version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from stagescope.wire.errors import InvalidInput

Tensor = Any
"""A torch tensor, a numpy array, or a list of rows."""


@dataclasses.dataclass(frozen=True)
class Dialect:
    """One trainer's names.

    Attributes:
        columns: Its column -> ours, `stagescope.wire.schema.PAYLOAD_TENSORS` and streams.
        producers: Our stream -> who computed it.
        rolled: Its columns in which index t is of token t + 1, while the others are of token t.
        zero_is_missing: Its columns in which 0.0 stands for a missing value.
        metrics: Its metric -> ours and the factor by which ours is multiplied.
    """

    columns: Mapping[str, str]
    producers: Mapping[str, str]
    rolled: frozenset[str] = frozenset()
    zero_is_missing: frozenset[str] = frozenset()
    metrics: Mapping[str, tuple[str, float]] = dataclasses.field(default_factory=dict)


_ROLLOUT: Final = {"rollout_log_probs": "rollout"}
_BOTH: Final = {**_ROLLOUT, "old_log_probs": "trainer", "log_probs": "trainer"}

DIALECTS: Final[Mapping[str, Dialect]] = {
    "areal": Dialect(
        columns={
            "input_ids": "responses", "loss_mask": "response_mask", "logprobs": "rollout_log_probs",
            "prox_logp": "old_log_probs", "ref_logp": "ref_log_probs", "versions": "versions",
            "turn_ids": "turn_ids", "rewards": "rewards", "advantages": "advantages",
        },
        producers=_BOTH,
        rolled=frozenset({"prox_logp", "ref_logp"}),
        # behave_approx_kl is p - q: the opposite sign of verl's kl.
        metrics={
            "behave_approx_kl": ("rollout_corr/kl", -1.0),
            "behave_imp_weight": ("calibration/ratio_mean", 1.0),
        },
    ),
    "slime": Dialect(
        columns={
            "loss_masks": "response_mask", "rollout_log_probs": "rollout_log_probs",
            "log_probs": "old_log_probs", "ref_log_probs": "ref_log_probs", "values": "values",
            "advantages": "advantages", "returns": "returns", "entropy": "entropy",
            "rewards": "rewards",
        },
        producers=_BOTH,
        metrics={
            "train/train_rollout_logprob_abs_diff": ("train_rollout_logprob_abs_diff", 1.0),
            "train/train_rollout_kl": ("rollout_corr/k3_kl", 1.0),
        },
    ),
    "nexrl": Dialect(
        columns={
            "tokens": "responses", "loss_mask": "response_mask", "logprobs": "rollout_log_probs",
            "old_log_probs": "old_log_probs", "log_probs": "log_probs", "entropy": "entropy",
            "advantages": "advantages", "response_mask": "response_mask",
        },
        producers=_BOTH,
        # Its mock rollout worker and its mock train service answer 0.0 throughout.
        zero_is_missing=frozenset({"logprobs", "old_log_probs"}),
    ),
    "skyrl": Dialect(
        columns={
            "loss_mask": "response_mask", "rollout_logprobs": "rollout_log_probs",
            "action_log_probs": "old_log_probs", "base_action_log_probs": "ref_log_probs",
            "advantages": "advantages", "returns": "returns", "values": "values",
            "rewards": "rewards",
        },
        producers=_BOTH,
        metrics={
            f"policy/rollout_train_logprobs_abs_diff_{name}": (f"logprob_abs_diff/{name}", 1.0)
            for name in ("mean", "max")
        },
    ),
    "nemo_rl": Dialect(
        columns={
            "token_ids": "responses", "input_ids": "responses",
            "token_loss_mask": "response_mask", "token_mask": "response_mask",
            "generation_logprobs": "rollout_log_probs", "prev_logprobs": "old_log_probs",
            "reference_policy_logprobs": "ref_log_probs", "advantages": "advantages",
        },
        producers=_BOTH,
        # force_on_policy_ratio leaves prev_logprobs at zero.
        zero_is_missing=frozenset({"prev_logprobs"}),
        metrics={
            "token_mult_prob_error": ("token_mult_prob_error", 1.0),
            "gen_kl_error": ("rollout_corr/k3_kl", 1.0),
            "sampling_importance_ratio": ("calibration/ratio_mean", 1.0),
        },
    ),
    "openrlhf": Dialect(
        columns={
            "action_mask": "response_mask", "rollout_log_probs": "rollout_log_probs",
            "action_log_probs": "old_log_probs", "base_action_log_probs": "ref_log_probs",
            "advantages": "advantages", "returns": "returns", "values": "values",
        },
        producers=_BOTH,
        # Its agent fills in 0.0 where the engine gave no log-prob.
        zero_is_missing=frozenset({"rollout_log_probs"}),
        metrics={"vllm_kl": ("rollout_corr/kl", 1.0)},
    ),
    "prime_rl": Dialect(
        columns={
            "token_ids": "responses", "loss_mask": "response_mask",
            # Of the update's own pass: all micro-steps have the weights that the step began with.
            "inference_logprobs": "rollout_log_probs", "trainer_logprobs": "log_probs",
            "entropy": "entropy", "advantages": "advantages",
        },
        producers=_BOTH,
        metrics={
            "mismatch_kl/all/mean": ("rollout_corr/k3_kl", 1.0),
            "importance_ratio/all/mean": ("calibration/ratio_mean", 1.0),
        },
    ),
    "trl": Dialect(
        columns={
            "completion_ids": "responses", "completion_mask": "response_mask",
            "sampling_per_token_logps": "rollout_log_probs",
            "old_per_token_logps": "old_log_probs", "ref_per_token_logps": "ref_log_probs",
            "advantages": "advantages",
        },
        producers=_BOTH,
        metrics={
            f"sampling/sampling_logp_difference/{name}": (f"logprob_abs_diff/{name}", 1.0)
            for name in ("mean", "max")
        },
    ),
    "verl": Dialect(
        columns={
            "responses": "responses", "response_mask": "response_mask",
            "rollout_log_probs": "rollout_log_probs", "old_log_probs": "old_log_probs",
            "ref_log_prob": "ref_log_probs", "advantages": "advantages", "returns": "returns",
        },
        producers=_BOTH,
    ),
}  # fmt: skip
"""By trainer. verl's metrics have the names that stagescope publishes."""


def read_batch(batch: Mapping[str, Tensor], trainer: str) -> dict[str, object]:
    """Return a trainer's batch by the names of `Stage.record`.

    Args:
        batch: Columns by the trainer's names, each [rows, tokens] or a list of rows; others, such
            as `sample_ids`, are returned as they are.
        trainer: One of DIALECTS.

    Returns:
        The columns, `producers` of the streams among them. A stream whose tokens under the mask are
        all 0.0, where the trainer writes 0.0 for a missing value, is left out: `missing_streams`
        names it, and `left_out` says why.

    Raises:
        InvalidInput: an unknown trainer, or two columns of one name.
    """
    dialect = DIALECTS.get(trainer)
    if dialect is None:
        raise InvalidInput(
            f"{trainer!r} is no trainer whose names are known", expected=", ".join(DIALECTS)
        )
    found: dict[str, object] = {}
    absent: list[str] = []
    for name, values in batch.items():
        ours = dialect.columns.get(name, name)
        if ours in found:
            theirs = [each for each in batch if dialect.columns.get(each, each) == ours]
            raise InvalidInput(f"{' and '.join(theirs)} are both {ours}", expected="one of them")
        if name in dialect.zero_is_missing and not _any_value(values):
            absent.append(ours)
            continue
        found[ours] = _unroll(values) if name in dialect.rolled else values
    producers = {name: who for name, who in dialect.producers.items() if name in found}
    why = f"0.0 in every token, which {trainer} writes where it has no value"
    left_out = dict.fromkeys(absent, f"{why}: it is not measured")
    missing = {"missing_streams": absent, "left_out": left_out} if absent else {}
    return {**found, "producers": producers, **missing}


def rename_metrics(numbers: Mapping[str, float], trainer: str) -> dict[str, float]:
    """Return published numbers by a trainer's own names, with its sign.

    Raises:
        InvalidInput: an unknown trainer.
    """
    dialect = DIALECTS.get(trainer)
    if dialect is None:
        raise InvalidInput(
            f"{trainer!r} is no trainer whose names are known", expected=", ".join(DIALECTS)
        )
    if not dialect.metrics:
        return dict(numbers)
    return {
        theirs: factor * numbers[ours]
        for theirs, (ours, factor) in dialect.metrics.items()
        if ours in numbers
    }


def _any_value(values: Tensor) -> bool:
    """Return whether any number is not exactly 0."""
    if isinstance(values, Sequence):
        return any(_any_value(row) if isinstance(row, Sequence) else row != 0 for row in values)
    return bool((values != 0).any())


def _unroll(values: Tensor) -> Tensor:
    """Return a column of which index t is of token t + 1 as one of which index t is of token t.

    What was of no token, the last column, becomes the first.
    """
    if isinstance(values, Sequence):
        return [[row[-1], *row[:-1]] if len(row) else row for row in values]
    if isinstance(values, np.ndarray):
        return np.roll(values, 1, axis=-1)
    return values.roll(1, dims=-1)
