"""The effect of the policy versions of a step's tokens on the checks of its streams.

The tokens of older policy versions are checked like all others. The mean of e^(p - q) is 1 for any
two policies, and noise of an update leaves d uncorrelated with q. Only an update that sharpens or
flattens the policy scales log-probs, as a temperature does. Tokens of the trainer's own version
distinguish the two, if enough of them are known.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import MANY, Check
from stagescope_service.statistics.noise_checks import DRIFTED_SLOPE, SCALED_Z, slope_text
from stagescope_service.statistics.summary import Summary

_ALIKE: Final = 0.5


@dataclasses.dataclass(frozen=True)
class Drift:
    """Older policy versions that sampled tokens of a step.

    Attributes:
        text: How many tokens, and how old.
        pair: Names of p and q.
        scales: Whether policy drift explains that log-probs are scaled: fresh tokens show none.
        lacks_fresh: Whether too few tokens are known to be fresh to show that.
    """

    text: str
    pair: tuple[str, str]
    scales: bool = False
    lacks_fresh: bool = False

    @classmethod
    def of(cls, summary: Summary) -> Drift | None:
        """Return the drift of a step; None: no token is older than the trainer's own version."""
        if not summary.has_stale_tokens:
            return None
        stale = summary.staleness.keys > 0
        ages = summary.staleness.keys[stale]
        tokens = int(summary.staleness.cells[stale, Field.MASKED].sum())
        newest, oldest = int(ages[0]), int(ages[-1])
        age = f"{newest} to {oldest}" if newest < oldest else f"{oldest}"
        return cls(
            f"older policy versions ({age} behind the trainer's) sampled {tokens} of the step's "
            f"{summary.total.masked} tokens",
            summary.pair,
        )

    def judged(self, check: Check) -> Check:
        """Return a check of tokens that may be stale, with the effect of staleness on it."""
        if check.status != "suspect":
            return check
        if check.name == "temperature":
            text = "policy drift adds to this only where it sharpens or flattens the policy"
            if self.scales:
                text = f"{check.text}; but {self.text}, and fresh ones show no slope"
                return dataclasses.replace(check, status="ok", text=text)
            if self.lacks_fresh and abs(check.values["slope"] - 1.0) <= DRIFTED_SLOPE:
                slope = slope_text(check.values, *self.pair)
                text = (
                    f"not decided: {slope}. A temperature does that, and so does an update that "
                    f"sharpens or flattens the policy, up to {DRIFTED_SLOPE:g} from 1; {self.text},"
                    " and too few tokens are fresh to tell"
                )
                return dataclasses.replace(check, status="unknown", text=text)
        elif check.name in ("calibration", "renormalised"):
            text = "policy drift leaves this mean at 1"
        else:
            return check
        return dataclasses.replace(check, text=f"{check.text}; {self.text}: {text}")


def differ_alike(all_tokens: Cell, fresh: Cell) -> bool:
    """Return whether fresh tokens differ half as much as all or more; True if they are too few.

    A temperature moves fresh and stale tokens alike, an update the stale ones alone.
    """
    if fresh.tokens < MANY:
        return True
    return fresh.mean(Field.D_ABS_SUM) >= _ALIKE * all_tokens.mean(Field.D_ABS_SUM)


def slope_in_fresh(
    of_all: Check, of_fresh: Check, all_tokens: Cell, fresh: Cell
) -> Literal["shown", "absent", "too few"]:
    """Return whether the fresh tokens show the slope of all tokens, if they are enough for it.

    Args:
        of_all, of_fresh: the checks `temperature` of all tokens and of the fresh ones.
        all_tokens, fresh: these tokens.
    """
    if of_fresh.status == "suspect":
        return "shown"
    if of_fresh.status == "unknown":
        return "too few"
    if of_all.status != "suspect":
        return "shown"  # no slope of all tokens that fresh ones could lack
    expected = abs(of_all.values["z"]) * math.sqrt(fresh.tokens / all_tokens.tokens)
    return "absent" if expected >= 2.0 * SCALED_Z else "too few"


def versions(summary: Summary) -> Check:
    """Check which policy versions sampled the tokens."""
    known: list[str] = [*summary.version_labels]
    values = {"versions": float(len(known))}
    if not known:
        return Check(
            "versions", "unknown", "the policy that sampled the tokens is not reported", values
        )
    texts = []
    if summary.has_impossible_versions:
        staleness = summary.staleness
        tokens = int(staleness.cells[staleness.keys < 0, Field.MASKED].sum())
        texts.append(
            f"{tokens} tokens are of policy versions up to {-staleness.keys[0]} ahead of the "
            f"trainer's (the newest is {known[-1]}), which do not exist yet: engine and trainer "
            "count versions in different ways, and staleness is not known"
        )
    if len(known) > 1:
        texts.append(
            f"the tokens come from {len(known)} policy versions ({_in_order(summary)}): the "
            "difference is policy drift plus mismatch"
            + ("; look at staleness 0" if summary.is_staleness_known else "")
        )
    gap = ""
    if summary.staleness.keys.size and (unknown := summary.tokens_of_unknown_age):
        gap = (
            f"how old {unknown} of the step's {summary.total.masked} tokens are is not known: the "
            "slices by staleness leave them out, and rules of one staleness look at all tokens"
        )
    if texts:
        return Check("versions", "suspect", "; ".join([*texts, gap] if gap else texts), values)
    if gap:
        return Check("versions", "unknown", gap, values)
    if summary.has_stale_tokens:
        age = int(summary.staleness.keys[0])
        text = (
            f"one policy version, {known[0]}, {age} behind the trainer's: no fresh token tells "
            "how much of the difference is policy drift"
        )
        return Check("versions", "unknown", text, values)
    return Check("versions", "ok", f"one policy version, {known[0]}", values)


def _in_order(summary: Summary) -> str:
    """Name the oldest and the newest policy version, and what orders texts."""
    first, last = summary.version_labels[0], summary.version_labels[-1]
    if not summary.version_names:
        return f"the oldest {first}, the newest {last}"
    if summary.are_versions_numbered:
        return f"by the number in them the oldest {first}, the newest {last}"
    return f"in the order in which they appear {first} to {last}: how old a token is, is not known"
