"""Evidence of turns that lose their model tokens: whether a turn still trains."""

from __future__ import annotations

import math
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from stagescope_service.rules.evidence import Evidence, not_found, not_measured, short
from stagescope_service.rules.history import RunHistory
from stagescope_service.statistics.cell import Float64, Int64
from stagescope_wire.batch.converters import keys_of


def turn_stops(history: RunHistory, *, factor: float) -> Evidence:
    """Return the turn that lost model tokens at once, and did not get them back.

    A turn's size is its tokens over those of the step's other turns, so that the batch size does
    not matter. It falls below `factor` times its median of up to `_BEFORE` steps before, further
    than it varied, and stays there until now. Turns of few tokens vary too much, so a turn needs
    `_TOKENS` tokens and a `_SHARE` of the step's. If the newest step's tensors are kept, as many of
    its samples must have the turn and no token of it under the mask. Else its responses became
    shorter. If they are not kept, `_BEFORE` steps before and `_AFTER` steps from it on must show
    it.
    """
    steps = history.slices("turn", "counts/masked_tokens", history.measured[-_SEARCHED:])
    steps = [(step, sizes) for step, sizes in steps if len(sizes) > 1 and any(sizes.values())]
    if not steps:
        return not_measured("no step has two turns by turn_ids")
    if len(steps) < 2:
        return not_measured("one step has two turns by turn_ids, 2 are needed", waits=True)
    numbers = sorted({turn for _, sizes in steps for _, turn in sizes})
    counts = np.array([[sizes.get((None, turn), 0.0) for turn in numbers] for _, sizes in steps])
    masked = _masked_turns(history)
    found: list[tuple[float, int, Evidence]] = []
    for at, turn in enumerate(numbers):
        begin = _begin_of_loss(counts[:, at], counts.sum(axis=1), factor)
        if begin is None:
            continue
        before = float(np.median(counts[max(begin - _BEFORE, 0) : begin, at]))
        after = float(np.median(counts[begin:, at]))
        text = (
            f"turn {turn} has {short(before)} model tokens a step before step "
            f"{steps[begin][0].step}, and {short(after)} from it on, while others keep theirs"
        )
        lines = [text]
        lost = 1.0 - after / before
        if masked is not None:
            rows, of = masked.samples.get(turn, (0, 0))
            if not rows or rows < _MASKED * lost * of:
                continue
            lines.append(
                f"step {masked.step}: {rows} of {of} samples with turn {turn} have no token of it "
                f"under the mask{masked.besides}"
            )
        elif begin < _BEFORE or len(steps) - begin < _AFTER:
            continue  # so few steps show no size, of before or of now
        evidence = Evidence("found", lost, steps[begin][0].step, f"turn {turn}", tuple(lines))
        found.append((lost, -turn, evidence))
    if not found:
        return not_found(f"the tokens of {len(numbers)} turns stay in proportion")
    return max(found, key=lambda each: each[:2])[2]


_TOKENS: Final = 200
_SHARE: Final = 0.05
"""Minimum tokens of a turn, and their share of the step's."""
_MASKED: Final = 0.5
"""Minimum samples without the turn under the mask, as a share of what the loss of tokens means."""
_SEARCHED: Final = 200
"""Number of newest measured steps whose turns are searched."""
_BEFORE: Final = 5
"""Number of steps before, which set a turn's usual size."""
_AFTER: Final = 3
"""Number of steps that suffice to show that a turn stays small."""
_VARIED: Final = 20
"""Number of steps before that show how much a turn's size varies."""


def _begin_of_loss(own: Float64, total: Float64, factor: float) -> int | None:
    """Return the index where a turn's size fell at once and stayed low; None: it never did."""
    others = total - own
    with np.errstate(divide="ignore", invalid="ignore"):
        sizes = np.where(others > 0.0, own / others, np.nan)
    for at in range(1, len(own)):
        first = max(at - _BEFORE, 0)
        usual = float(np.nanmedian(sizes[first:at])) if np.isfinite(sizes[first:at]).any() else 0.0
        is_large = np.median(own[first:at]) >= max(_TOKENS, _SHARE * np.median(total[first:at]))
        varied = sizes[max(at - _VARIED, 0) : at]
        spread = float(np.nanstd(varied)) if usual > 0.0 else 0.0
        largest = float(np.nanmax(sizes[at:], initial=0.0))
        orders = math.comb(len(varied) + len(sizes) - at, len(varied))
        is_beyond = largest < np.nanmin(varied, initial=np.inf) and orders > _BY_CHANCE
        is_beyond = is_beyond and largest <= factor * sizes[at - 1]
        is_at_once = sizes[at - 1] > _USUAL * usual and largest <= usual - _WIDTHS * spread
        is_low = largest <= factor * usual and (is_at_once or is_beyond)
        if usual > 0.0 and is_large and is_low:
            return at
    return None


_USUAL: Final = 0.8
"""Minimum size just before a fall, over the usual one: else it fell slowly."""
_WIDTHS: Final = 2.0
"""Standard deviations by which a turn falls further than its size varied."""
_BY_CHANCE: Final = 100_000
"""Orders of the sizes before and after, of which only one has all later ones below all earlier."""
_Bools: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]"


class _Masked(NamedTuple):
    """Which turns are fully masked in samples of a step that train on another turn."""

    step: int
    samples: dict[int, tuple[int, int]]
    """Turn -> (samples that have it and train on others alone, samples that have it and train)."""
    without: int
    """Samples that train on no turn."""

    @property
    def besides(self) -> str:
        """Text on the samples that are not counted; "" if there are none."""
        return f" ({self.without} more train on no turn)" if self.without else ""


def _masked_turns(history: RunHistory) -> _Masked | None:
    """Return the turns that are fully masked in samples of the newest step; None: not kept.

    A sample that trains on no turn is left out: a filter of whole samples, such as too long ones,
    masks it. If a row holds one turn, its trajectory is the sample.
    """
    if history.kept is None or not history.measured:
        return None
    step = history.measured[-1]
    for mask in ("response_mask", "loss_mask"):
        batch = history.kept.batch(step, ("turn_ids", mask))
        if batch is None:
            continue
        ids = batch["turn_ids"].reshape(batch.rows, -1).astype(np.int64)
        on = batch[mask].reshape(batch.rows, -1) != 0
        if ids.shape != on.shape:
            return None
        first: dict[tuple[str, str], int] = {}
        keys = (
            key if key[0] else ("", str(row))  # a row without a group is its own sample
            for row, key in enumerate(keys_of(batch))
        )
        owner = np.array([first.setdefault(key, len(first)) for key in keys], np.int64)
        trains = _of_samples(owner, (on & (ids >= 0)).any(axis=1))
        found = {}
        for turn in np.unique(ids[ids >= 0]).tolist():
            is_turn = ids == turn
            has = trains & _of_samples(owner, is_turn.any(axis=1))
            without = has & ~_of_samples(owner, (is_turn & on).any(axis=1))
            found[turn] = (int(without.sum()), int(has.sum()))
        return _Masked(step.step, found, int((~trains).sum()))
    return None


def _of_samples(owner: Int64, rows: _Bools) -> _Bools:
    """Return which samples have one of some rows; `owner` is the sample of each row."""
    found = np.zeros(int(owner.max(initial=-1)) + 1, np.bool_)
    found[owner[rows]] = True
    return found
