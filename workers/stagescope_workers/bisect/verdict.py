"""Names the cause: at which swap the mismatch disappears, and which hypothesis explains that swap.

Pure: nothing here needs an engine or a model.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from stagescope_workers.bisect import arms
from stagescope_workers.bisect.arms import ARMS, Distance, Rung, Scores, distance, rungs
from stagescope_workers.bisect.kept import Float64

Side = Literal["rollout", "trainer"]

SHARE: Final = 0.25
"""A mismatch that falls to this share of itself has disappeared."""
HALF: Final = 0.5
NOISES: Final = 3.0
"""Noise floors up to which two series are equal."""
ROUNDINGS: Final = 1.5
"""Mean |d| of a correct step, in units of what the engine's dtype makes of the model."""
MOST_ROUNDING: Final = 0.1
"""Nats beyond which the rounding of a dtype is a cause, too."""
EQUAL: Final = 1e-4
"""Nats up to which two series are equal in any case: float32 sums in another order."""


CONSTANT: Final = "constant"
"""The kind of a hypothesis that a more exact one precedes: a cut moves all log-probs, too."""
_RECORDED_ALONE: Final = frozenset({"shifted", "reordered", "rounded", CONSTANT})
"""Kinds of hypotheses on the recorded log-probs of both sides, without a model."""


class Tried(NamedTuple):
    """A hypothesis on one side, and how well it reproduces that side's log-probs.

    Attributes:
        kind: such as "temperature".
        side: whose recorded log-probs it should reproduce.
        text: the cause as a sentence.
        was: mean |difference| to that side without the hypothesis, over the tried tokens.
        now: the same with it.
        tokens: tokens over which both were taken.
    """

    kind: str
    side: Side
    text: str
    was: float
    now: float
    tokens: int

    def holds(self, rounding: float) -> bool:
        """Return whether it reproduces that side, up to the rounding of the engine's dtype."""
        limit = max(SHARE * self.was, min(ROUNDINGS * rounding, HALF * self.was))
        return self.was > EQUAL and self.now <= limit


class Gap(NamedTuple):
    """Between which two neighbours of the ladder the difference lies.

    Attributes:
        arm: the swap at which the mismatch disappears; "trainer": after the last arm, so that only
            the trainer's own log-probs are different; "": nowhere.
        side: the side whose log-probs are unlike the arms'.
        was, now: mean |d| to the trainer before and after that swap.
        is_reproduced: whether the arm before that swap gives what the rollout recorded.
        is_partial: whether over a quarter of the mismatch remains.
    """

    arm: str
    side: Side
    was: float
    now: float
    is_reproduced: bool = True
    is_partial: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ladder:
    """The arms that were done, and what follows from their numbers.

    Attributes:
        rungs: the arms in order, those that were not done, too.
        mismatch: the recorded mismatch.
        floor: the largest noise floor of an arm.
        rounding: mean |d| that the engine's dtype makes of the model; 0 where it is unknown.
        is_rounding_known: whether the arms that show it were done.
        gap: see `Gap`; None if the recorded mismatch is within the noise floor.
    """

    rungs: tuple[Rung, ...]
    mismatch: Distance
    floor: float
    rounding: float
    is_rounding_known: bool
    gap: Gap | None


def ladder(scores: Sequence[Scores], p: Float64, dtype: str = "bfloat16") -> Ladder:
    """Return what follows from the arms' scores.

    Args:
        scores: the arms in the order of the ladder; the first has the rollout's recorded values.
        p: the trainer's recorded log-probs.
        dtype: the engine's, as the arms assume it.
    """
    found = tuple(rungs(scores, p))
    mismatch = distance(scores[0].values, p)
    floors = [each.floor for each in scores if each.status == "done" and each.floor >= 0]
    floor = max(floors, default=0.0)
    rounding = _rounding(scores)
    gap = None
    if mismatch.mean > max(NOISES * floor, EQUAL):
        done = [each for each in scores if each.status == "done"]
        gap = _gap(done, p, mismatch.mean, rounding)
    names = {each.arm for each in scores if each.status == "done"}
    is_known = dtype == "float32" or {arms.TRANSFORMERS, arms.FLOAT32} <= names
    return Ladder(rungs=found, mismatch=mismatch, floor=floor, rounding=rounding,
                  is_rounding_known=is_known, gap=gap)  # fmt: skip


def _rounding(scores: Sequence[Scores]) -> float:
    """Return what the engine's dtype makes of the model's log-probs.

    An engine whose scores are those of float32 has no such rounding.
    """
    done = {each.arm: each.values for each in scores if each.status == "done"}
    coarse, fine = done.get(arms.TRANSFORMERS), done.get(arms.FLOAT32)
    if coarse is None or fine is None:
        return 0.0
    rounding = distance(coarse, fine).mean
    engine = next((done[name] for name in (arms.SINGLE, arms.PREFILL) if name in done), None)
    if engine is not None and distance(engine, fine).mean < rounding / 10:
        return 0.0
    return rounding


def _gap(done: Sequence[Scores], p: Float64, mismatch: float, rounding: float) -> Gap:
    q = done[0].values
    drops: list[tuple[float, Gap]] = []
    for before, arm in itertools.pairwise(done):
        here = distance(q, p, within=arm.values + before.values).mean
        was = distance(before.values, p, within=arm.values)
        now = distance(arm.values, p, within=before.values)
        if was.tokens == 0 or here < SHARE * mismatch:
            continue  # The arms have few of the tokens that differ.
        unlike = distance(before.values, q, within=arm.values).mean
        is_reproduced = unlike <= max(HALF * here, min(ROUNDINGS * rounding, here))
        gap = Gap(arm.arm, "rollout", was.mean, now.mean, is_reproduced)
        drops.append(((was.mean - now.mean) / here, gap))
        left = distance(arm.values, p).mean
        if max(now.mean, left) <= max(SHARE * here, NOISES * max(arm.floor, 0.0), EQUAL):
            drop, largest = max(drops, key=lambda each: each[0])
            # The last piece of the mismatch is not its cause.
            is_last_piece = drops[-1][0] < HALF <= drop
            return largest._replace(is_partial=True) if is_last_piece else gap
    last = done[-1]
    unlike = distance(last.values, q).mean
    left = distance(last.values, p).mean
    if len(done) > 1 and unlike <= max(
        SHARE * mismatch, min(ROUNDINGS * rounding, HALF * mismatch)
    ):
        return Gap(arms.TRAINER, "trainer", left, 0.0)
    if drops:
        drop, gap = max(drops, key=lambda each: each[0])
        if drop >= HALF:
            return gap._replace(is_partial=True)
    return Gap("", "rollout", mismatch, left)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer.

    Attributes:
        kind: of the cause, such as "prefix_cache"; "none": no cause was found; "healthy": nothing
            is wrong with the step.
        text: the cause in one sentence, with its numbers.
        meaning: what it means.
        advice: what to do next.
    """

    kind: str
    text: str
    meaning: str
    advice: str

    @property
    def is_named(self) -> bool:
        """Whether a cause was named."""
        return self.kind not in ("none", "healthy")


class _Cause(NamedTuple):
    kind: str
    meaning: str
    advice: str


_CAUSES: Final = {
    arms.DECODED: _Cause(
        "changed",
        "The engine no longer gives what it gave in that step: its weights, its cache or its "
        "settings were others then.",
        "compare the engine's log and restarts with the time of the step; check the weight sync",
    ),
    arms.UNCACHED: _Cause(
        "prefix_cache",
        "The engine's prefix cache holds keys and values of older weights.",
        "reset the prefix cache after every weight sync",
    ),
    arms.PREFILL: _Cause(
        "decode",
        "The engine decodes otherwise than it reads a prompt: another kernel, another state, or "
        "processed log-probs.",
        "try the engine without graphs and with another attention backend",
    ),
    arms.SINGLE: _Cause(
        "batching",
        "The engine's result depends on which sequences it computes together.",
        "try the engine's batch-invariant mode",
    ),
    arms.TRANSFORMERS: _Cause(
        "weights",
        "The engine does not compute what the model in --model computes. It has other weights (a "
        "sync that did not arrive, quantised weights), or its model code differs.",
        "load the engine's weights from --model and run this again; stagescope weights compares "
        "checksums",
    ),
    arms.HEAD: _Cause(
        "head_rounding",
        "One side computes the head (logits, log-softmax) in a 16-bit dtype, the other in float32.",
        "compute the head in float32 on both sides",
    ),
    arms.FLOAT32: _Cause(
        "dtype",
        "The engine computes in another dtype than the trainer.",
        "compute in the same dtype on both sides",
    ),
    arms.EAGER: _Cause(
        "attention",
        "The implementations of the attention differ.",
        "give the trainer the engine's attention, or report the difference to its project",
    ),
    arms.CHECKPOINT: _Cause(
        "weights",
        "The engine computes with the weights of --model and not with the trainer's.",
        "the weight sync did not arrive: sync again; stagescope weights compares checksums",
    ),
    arms.ROUTING: _Cause(
        "routing",
        "Engine and trainer choose other experts for the same tokens.",
        "replay the rollout's routing in the trainer",
    ),
    arms.TRAINER: _Cause(
        "trainer_weights",
        "Engine and transformers agree with the rollout. Only the trainer is different: it has "
        "other weights than the engine, or its own computation differs.",
        "give the trainer's weights with --checkpoint DIR; check the weight sync",
    ),
}  # fmt: skip
_ADVICE: Final = {
    "shifted": "align the log-probs with their tokens where the payload is made",
    "reordered": "check how rows are sorted, padded and split between engine and trainer; give "
    "sample_ids, so that rows are paired by sample",
    CONSTANT: "look for what is added to one side's log-probs: a penalty, a correction, a "
    "renormalisation",
    "rounded": "send both log-probs in float32",
    "temperature": "use one temperature for both sides' log-probs, or raw log-probs on both",
    "processed": "ask the engine for raw log-probs (vLLM: --logprobs-mode raw_logprobs)",
    "head_rounding": "compute the head in float32 on both sides",
    "softmax_rounding": "compute the log-softmax in float32 on both sides",
    "positions": "check how position ids are made: padding, packing, BOS, the start of responses",
}  # fmt: skip
_SMALL: Final = (
    arms.DECODED, arms.PREFILL, arms.SINGLE, arms.TRANSFORMERS, arms.FLOAT32, arms.EAGER,
    arms.TRAINER, "",
)  # fmt: skip
"""Swaps at which a difference of the size of the rounding is expected."""


def needs_hypotheses(found: Ladder) -> bool:
    """Return whether the swap alone does not say what differs."""
    gap = found.gap
    if gap is None:
        return False
    return not gap.is_reproduced or gap.arm not in (
        arms.UNCACHED, arms.SINGLE, arms.HEAD, arms.CHECKPOINT, arms.ROUTING,
    )  # fmt: skip


def decide(found: Ladder, tried: Sequence[Tried]) -> Verdict:
    """Return the answer.

    Args:
        found: the ladder.
        tried: the hypotheses that were tried.
    """
    gap = found.gap
    if gap is None:
        return Verdict(
            kind="healthy",
            text=f"Nothing is wrong with this step: its mismatch of {_n(found.mismatch.mean)} is "
            f"within the noise floor ({_n(max(found.floor, EQUAL))}).",
            meaning="Rollout and trainer agree.",
            advice="",
        )
    holding = [each for each in tried if each.holds(found.rounding)]
    if holding:
        best = min(holding, key=lambda each: (each.kind == CONSTANT, each.now / each.was))
        return _explained(best, found)
    if found.rounding and gap.arm in _SMALL and _is_rounding(found):
        return Verdict(
            kind="healthy",
            text=f"Nothing is wrong with this step: its mismatch of {_n(found.mismatch.mean)} is "
            f"what the engine's dtype makes of this model ({_n(found.rounding)}).",
            meaning=_where(gap),
            advice="",
        )
    may_be_rounding = not found.is_rounding_known and found.mismatch.mean <= MOST_ROUNDING
    if may_be_rounding and gap.arm in (arms.TRANSFORMERS, arms.TRAINER):
        return Verdict(
            kind="none",
            text=f"No cause can be named: the mismatch of {_n(found.mismatch.mean)} may be the "
            "rounding of the engine's dtype, which was not measured.",
            meaning=_where(gap),
            advice="run the arms transformers and float32, too",
        )
    if not gap.arm:
        return Verdict(
            kind="none",
            text=f"No cause was found: the mismatch of {_n(found.mismatch.mean)} disappears at no "
            "swap.",
            meaning="No arm gives what the trainer recorded, and no arm gives what the rollout "
            "recorded.",
            advice="the engine or the model have other weights than in that step: load those of "
            "the step, or give --checkpoint",
        )
    return _swapped(gap, found)


def _explained(best: Tried, found: Ladder) -> Verdict:
    other = "trainer" if best.side == "rollout" else "rollout"
    return Verdict(
        kind=best.kind,
        text=f"{best.text}: so computed, {_n(best.was)} becomes {_n(best.now)} ({_noise(found)}).",
        meaning=f"This reproduces the {best.side}'s log-probs over {best.tokens} tokens, from the "
        + (
            f"{other}'s."
            if best.kind in _RECORDED_ALONE
            else f"model that reproduces the {other}'s."
        ),
        advice=_ADVICE[best.kind],
    )


def _swapped(gap: Gap, found: Ladder) -> Verdict:
    cause = _CAUSES[gap.arm]
    kind, meaning, advice = cause
    noise = _noise(found)
    if gap.arm == arms.TRAINER:
        done = {each.arm for each in found.rungs if each.scores.status == "done"}
        if not done - {arms.RECORDED, *arms.ENGINE_ARMS}:
            return Verdict(
                kind="none",
                text=f"No cause can be named: the engine gives what the rollout recorded, "
                f"{_n(gap.was)} from the trainer's, and no model scored the tokens.",
                meaning="Either side may be wrong.",
                advice="give --model, so that transformers scores them, too",
            )
        both = "engine and --model give" if done & {*arms.ENGINE_ARMS} else "--model gives"
        text = (
            f"Only the trainer's own log-probs differ: {both} what the rollout recorded, "
            f"{_n(gap.was)} from the trainer's ({noise})."
        )
        is_checkpoint = any(
            each.arm == arms.CHECKPOINT and each.scores.status == "done" for each in found.rungs
        )
        if is_checkpoint:
            advice = "the checkpoint's weights are not those of this step, or the trainer's " \
                     "computation differs: compare operators (stagescope capture)"  # fmt: skip
        return Verdict(kind=kind, text=text, meaning=meaning, advice=advice)
    what = "Most of the mismatch disappears" if gap.is_partial else "The mismatch disappears"
    text = f"{what} {ARMS[gap.arm].when}: {_n(gap.was)} becomes {_n(gap.now)} ({noise})."
    first = next((e.arm for e in found.rungs if e.before == arms.RECORDED), "")
    if gap.arm == first and gap.arm in (arms.DECODED, arms.PREFILL, arms.SINGLE):
        # The engine's first arm swaps the time, too.
        kind, meaning, advice = _CAUSES[arms.DECODED]
        if gap.arm in (arms.PREFILL, arms.SINGLE):
            meaning += " Or it decodes otherwise than it reads a prompt."
    elif not gap.is_reproduced:
        meaning += (
            " The arm before does not give what the rollout recorded either: the engine has "
            "changed since that step."
        )
    return Verdict(kind=kind, text=text, meaning=meaning, advice=advice)


def _is_rounding(found: Ladder) -> bool:
    return found.mismatch.mean <= min(ROUNDINGS * found.rounding, MOST_ROUNDING)


def _where(gap: Gap) -> str:
    if gap.arm in ARMS:
        return f"The rest disappears {ARMS[gap.arm].when}."
    return "No single swap makes the rest disappear."


def _noise(found: Ladder) -> str:
    rounding = f", rounding of the dtype {_n(found.rounding)}" if found.rounding else ""
    return f"noise floor {_n(found.floor)}{rounding}"


def _n(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.2g}"
