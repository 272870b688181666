"""A whole bisect: the arms in order, then the hypotheses, then the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from stagescope_wire.errors import StagescopeError
from stagescope_workers.bisect import arms
from stagescope_workers.bisect.arms import Scores, distance
from stagescope_workers.bisect.hypotheses import ModelHypotheses, on_kept_numbers
from stagescope_workers.bisect.kept import Kept
from stagescope_workers.bisect.scoring import Scorer, variant_of
from stagescope_workers.bisect.state import State
from stagescope_workers.bisect.verdict import (
    CONSTANT,
    Ladder,
    Tried,
    Verdict,
    decide,
    ladder,
    needs_hypotheses,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bisection:
    """The result.

    Attributes:
        kept: the tokens.
        ladder: the arms with their numbers.
        tried: the hypotheses that were tried.
        verdict: the answer.
        notes: what limits the answer.
    """

    kept: Kept
    ladder: Ladder
    tried: tuple[Tried, ...]
    verdict: Verdict
    notes: tuple[str, ...] = ()


def bisect(
    scorer: Scorer,
    state: State,
    *,
    on_arm: Callable[[Scores], bool] = lambda scores: False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Bisection:
    """Score the arms that are not done, try hypotheses, and name the cause.

    If an arm of the engine fails, the state stays unfinished: the next call tries that arm again.

    Args:
        scorer: scores an arm.
        state: what is done; arms are added to it.
        on_arm: called with each done arm until it returns that the arm is recorded, also in a later
            call.
        on_progress: called with a description of each activity.

    Raises:
        StoreError: the state cannot be written.
    """
    done = state.done()
    scores: list[Scores] = []
    for name in arms.NAMES:
        if name in done and not scorer.left_out(name):
            found = done[name]
        else:
            found = scorer.score(name)
            if found.status == "done":
                state.save(found)
        if found.status == "done" and name not in state.recorded and on_arm(found):
            state.mark_recorded(name)
        scores.append(found)
    found_ladder = ladder(scores, scorer.kept.p, scorer.sides.dtype)
    tried: list[Tried] = []
    notes: list[str] = []
    if found_ladder.gap is not None:
        tried += on_kept_numbers(scorer.kept)
        holding = {each.kind for each in tried if each.holds(found_ladder.rounding)}
        is_explained = bool(holding - {CONSTANT})
        if needs_hypotheses(found_ladder) and not is_explained:
            try:
                is_constant = CONSTANT in holding
                tried += _with_the_model(scorer, scores, found_ladder, is_constant, on_progress)
            except StagescopeError as error:
                notes.append(f"hypotheses were not tried with the model: {error.wrong}")
            except (RuntimeError, TypeError, AttributeError, ValueError) as error:
                notes.append(f"hypotheses were not tried with the model: {error!s:.200}")
    scorer.models.close()
    verdict = decide(found_ladder, tried)
    if scorer.kept.place is not None and verdict.kind != "healthy":
        text = verdict.text[:1].lower() + verdict.text[1:]
        verdict = dataclasses.replace(verdict, text=f"{scorer.kept.place.text}, {text}")
    if not any(each.status == "failed" and each.arm in arms.ENGINE_ARMS for each in scores):
        state.finish()
    return Bisection(
        kept=scorer.kept,
        ladder=found_ladder,
        tried=tuple(tried),
        verdict=verdict,
        notes=tuple(notes),
    )


def _with_the_model(
    scorer: Scorer,
    scores: Sequence[Scores],
    found: Ladder,
    is_constant: bool,
    on_progress: Callable[[str], None],
) -> list[Tried]:
    """Try variants of the model that reproduces one side, to reproduce the other."""
    assert found.gap is not None
    side = found.gap.side
    known = scorer.kept.p if side == "rollout" else scorer.kept.q
    local = [each for each in scores if each.arm in arms.LOCAL_ARMS and each.status == "done"]
    if not local:
        return []
    nearest = min(local, key=lambda each: distance(each.values, known).mean)
    return list(
        ModelHypotheses(
            kept=scorer.kept,
            model=scorer.model_of(nearest.arm),
            side=side,
            mismatch=found.mismatch.mean,
            rounding=found.rounding,
            base=variant_of(nearest.arm),
            is_float32=nearest.arm != arms.TRANSFORMERS or scorer.sides.dtype == "float32",
            is_constant=is_constant,
            on_progress=on_progress,
        )
    )
