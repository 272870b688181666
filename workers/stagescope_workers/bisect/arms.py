"""The ladder: its arms from the engine's side to the trainer's, what each swaps, what it measured.

Pure: nothing here needs an engine or a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from stagescope_workers.bisect.kept import Float64

Status = Literal["done", "left out", "failed"]
RECORDED: Final = "recorded"
DECODED: Final = "decoded"
UNCACHED: Final = "uncached"
PREFILL: Final = "prefill"
SINGLE: Final = "single"
TRANSFORMERS: Final = "transformers"
HEAD: Final = "head"
FLOAT32: Final = "float32"
EAGER: Final = "eager"
CHECKPOINT: Final = "checkpoint"
ROUTING: Final = "routing"
TRAINER: Final = "trainer"


class Arm(NamedTuple):
    """One arm of the ladder.

    Attributes:
        name: as `--arms` has it.
        swap: what it swaps against the arm before it.
        when: the swap as a clause after "the mismatch disappears".
    """

    name: str
    swap: str
    when: str


LADDER: Final = (
    Arm(RECORDED, "as the rollout recorded it", ""),
    Arm(DECODED, "the engine decodes the same tokens today, with its prefix cache",
        "when the engine scores the same tokens again today"),
    Arm(UNCACHED, "the engine's prefix cache is not used",
        "when the engine's prefix cache is not used"),
    Arm(PREFILL, "the engine scores by prefill instead of decoding",
        "when the engine scores by prefill instead of decoding"),
    Arm(SINGLE, "the engine scores one sequence at a time",
        "when the engine scores one sequence at a time"),
    Arm(TRANSFORMERS, "transformers with --model instead of the engine, in the engine's dtype",
        "when transformers with --model scores instead of the engine"),
    Arm(HEAD, "the head (logits, log-softmax) is computed in float32",
        "when the head is computed in float32"),
    Arm(FLOAT32, "the whole model is computed in float32",
        "when the whole model is computed in float32"),
    Arm(EAGER, "attention is computed by the eager implementation",
        "when attention is computed by the eager implementation"),
    Arm(CHECKPOINT, "the weights are those of the trainer's --checkpoint",
        "when the weights are those of the trainer's checkpoint"),
    Arm(ROUTING, "the experts are those that the rollout chose",
        "when the experts are those that the rollout chose"),
)  # fmt: skip
"""From the rollout to the trainer. After the last arm come the trainer's recorded log-probs."""
NAMES: Final = tuple(arm.name for arm in LADDER)
ARMS: Final = {arm.name: arm for arm in LADDER}
ENGINE_ARMS: Final = (DECODED, UNCACHED, PREFILL, SINGLE)
LOCAL_ARMS: Final = (TRANSFORMERS, HEAD, FLOAT32, EAGER, CHECKPOINT, ROUTING)


class Cost(NamedTuple):
    """What an arm will cost.

    Attributes:
        arm: its name.
        tokens: tokens that are read.
        requests: requests to the engine; 0 for transformers.
        seconds: the estimate; None where nothing was tried.
        left_out: why it is not run; "" if it is.
    """

    arm: str
    tokens: int
    requests: int
    seconds: float | None
    left_out: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What an arm gave.

    Attributes:
        arm: its name.
        status: of the arm.
        values: log-prob of each response token of the kept rows; NaN where it has none.
        floor: mean |difference| of the arm scored twice, in nats; NaN where it was not.
        floor_tokens: tokens that were scored twice.
        seconds: what the arm took.
        reason: why it was left out or failed.
    """

    arm: str
    status: Status = "done"
    values: Float64 = dataclasses.field(default_factory=lambda: np.empty(0))
    floor: float = float("nan")
    floor_tokens: int = 0
    seconds: float = 0.0
    reason: str = ""


class Distance(NamedTuple):
    """|difference| of two series over the tokens that both have."""

    mean: float
    p99: float
    max: float
    tokens: int


def distance(one: Float64, other: Float64, within: Float64 | None = None) -> Distance:
    """Return the distance of two series; `within` limits the tokens to those it has, too."""
    gaps = np.abs(one - other)
    if within is not None:
        gaps = gaps[np.isfinite(within)]
    gaps = gaps[np.isfinite(gaps)]
    if not len(gaps):
        return Distance(float("nan"), float("nan"), float("nan"), 0)
    return Distance(
        float(gaps.mean()), float(np.quantile(gaps, 0.99)), float(gaps.max()), len(gaps)
    )


class Rung(NamedTuple):
    """An arm in the ladder.

    Attributes:
        scores: what it gave.
        to_trainer: distance to the trainer's recorded log-probs; None for an arm that was not done.
        before: the arm that was done before it; "" for the first.
        to_before: distance to that arm.
        was, now: distances of that arm and of this one to the trainer's, over the tokens that both
            scored.
    """

    scores: Scores
    to_trainer: Distance | None = None
    before: str = ""
    to_before: Distance | None = None
    was: Distance | None = None
    now: Distance | None = None

    @property
    def arm(self) -> str:
        """The name of the arm."""
        return self.scores.arm


def rungs(scores: Sequence[Scores], p: Float64) -> Iterator[Rung]:
    """Yield the arms in order with their distances.

    Args:
        scores: the arms in the order of the ladder, the recorded ones first.
        p: the trainer's recorded log-probs.
    """
    before: Scores | None = None
    for each in scores:
        if each.status != "done":
            yield Rung(each)
            continue
        to_trainer = distance(each.values, p)
        if before is None:
            yield Rung(each, to_trainer)
        else:
            yield Rung(
                each,
                to_trainer,
                before.arm,
                distance(each.values, before.values),
                distance(before.values, p, within=each.values),
                distance(each.values, p, within=before.values),
            )
        before = each
