"""Tries cheap hypotheses: on the kept numbers alone, and with variants of the trainer's model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from stagescope_wire.schema import RankKey
from stagescope_workers.bisect.kept import Float64, Int64, Kept, Row
from stagescope_workers.bisect.variants import CELLS, Float32, Logits, Model, Variant
from stagescope_workers.bisect.verdict import CONSTANT, ROUNDINGS, Side, Tried

_SHIFTS: Final = (1, -1, 2, -2)
_MIN_TOKENS: Final = 16
"""Tokens below which a shift cannot be distinguished from chance."""
_MIN_ROW: Final = 8
"""Tokens below which a row is not compared with other rows."""
_MOST_ROWS: Final = 2048
"""Rows of a step that are compared with each row that is scored."""
_MOST_OF: Final = 0.75
"""The least constant, in units of the mean |d|, that can explain the mismatch."""
_TOKENS: Final = 1024
"""Tokens over which a variant is tried: of the rows that differ most."""
_FIT_TOKENS: Final = 128
_PLACES: Final = 16
_STEPS: Final = (1, -1, 2, -2, 3, -3, 4, -4)


def on_kept_numbers(kept: Kept) -> Iterator[Tried]:
    """Yield the hypotheses that need neither an engine nor a model."""
    for by in _SHIFTS:
        own, shifted = _shifted(kept, by)
        if len(own) < _MIN_TOKENS:
            continue
        side = "later" if by > 0 else "earlier"
        text = (
            f"The rollout's log-probs are shifted: each stands {_tokens(abs(by))} {side} than the "
            f"trainer's"
        )
        yield Tried("shifted", "rollout", text, float(own.mean()), float(shifted.mean()), len(own))
    q, p = kept.q, kept.p
    q, p = q[np.isfinite(q)], p[np.isfinite(p)]
    was = float(np.abs(q - p).mean())
    both: tuple[tuple[Side, Float64, Float64], ...] = (("rollout", q, p), ("trainer", p, q))
    for of, one, other in both:
        now = float(np.abs(_bfloat16(other) - one).mean())
        text = f"The {of}'s log-probs are the other side's, rounded to bfloat16"
        yield Tried("rounded", of, text, was, now, len(q))
    yield from _reordered(kept)
    offset = float(np.median(q - p))
    if abs(offset) >= _MOST_OF * was:
        side = "above" if offset > 0 else "below"
        text = f"The rollout's log-probs are {abs(offset):.2g} nat {side} the trainer's everywhere"
        yield Tried(CONSTANT, "rollout", text, was, float(np.abs(q - p - offset).mean()), len(q))


def _reordered(kept: Kept) -> Iterator[Tried]:
    """Yield whether the rollout's log-probs of each row are the trainer's of another row."""
    own, matched = [np.empty(0)], [np.empty(0)]
    others: set[RankKey | None] = set()
    count = 0
    for row in kept.rows:
        places = np.flatnonzero(row.counted)
        if len(places) < _MIN_ROW:
            continue
        tried = [
            (float(gaps.mean()), gaps, other)
            for other in kept.step_rows[:_MOST_ROWS]
            if len(gaps := _gaps_to(row, places, other)) >= _MIN_ROW
        ]
        if not tried:
            continue
        _, gaps, best = min(tried, key=lambda each: each[0])
        matched.append(gaps)
        own.append(np.abs(row.q - row.p)[places])
        if best.name != row.name:
            count += 1
            others.add(best.rank)
    was, now = np.concatenate(own), np.concatenate(matched)
    if not count or len(now) < _MIN_TOKENS:
        return
    rank = next(iter(others))
    of_one = len(others) == 1 and rank is not None and rank not in {row.rank for row in kept.rows}
    where = f" of {rank[0]} rank {rank[1]}" if of_one and rank is not None else ""
    text = (
        f"The rows of the two sides are in another order: the rollout's log-probs of a row are the "
        f"trainer's of another row{where}"
    )
    yield Tried("reordered", "rollout", text, float(was.mean()), float(now.mean()), len(now))


def _gaps_to(row: Row, places: Int64, other: Row) -> Float64:
    """Return |rollout - trainer of another row| at the row's places that count in the other row,
    too: beside them, the rollout has no log-probs of it."""
    inside = places[: int(np.searchsorted(places, len(other.p)))]
    inside = inside[other.counted[inside]]
    gaps = np.abs(row.q[inside] - other.p[inside])
    return gaps if np.isfinite(gaps).all() else np.empty(0)


def _shifted(kept: Kept, by: int) -> tuple[Float64, Float64]:
    """Return |d| at the same token, and of the rollout's value `by` tokens later."""
    own, shifted = [np.empty(0)], [np.empty(0)]
    for row in kept.rows:
        step = abs(by)
        early, late = slice(None, len(row.q) - step), slice(step, None)
        at_p, at_q = (early, late) if by > 0 else (late, early)
        if len(row.q) <= step:
            continue
        both = row.counted[at_p] & row.counted[at_q]
        own.append(np.abs(row.p - row.q)[at_p][both])
        shifted.append(np.abs(row.p[at_p] - row.q[at_q])[both])
    return np.concatenate(own), np.concatenate(shifted)


def _bfloat16(values: Float64) -> Float64:
    """Return the values rounded to bfloat16, to the nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return rounded.view(np.float32).astype(np.float64)


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


class _Chosen(NamedTuple):
    """A row on which variants are tried; `target` are the log-probs to reproduce."""

    row: Row
    target: Float64


@dataclasses.dataclass
class ModelHypotheses:
    """Tries variants of a model that reproduces one side, until one reproduces the other.

    Args:
        kept: the tokens.
        model: the model.
        side: whose recorded log-probs a variant should reproduce.
        mismatch: the recorded mismatch; below the rounding only other roundings are tried.
        rounding: what the engine's dtype makes of the model.
        base: how the model reproduces the other side.
        is_float32: whether its head computes in float32.
        is_constant: whether a constant explains the mismatch; only a cut does so, too.
        on_progress: called with a description of each activity.
    """

    kept: Kept
    model: Model
    side: Side
    mismatch: float
    rounding: float
    base: Variant
    is_float32: bool
    is_constant: bool = False
    on_progress: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        by_mismatch = sorted(
            self.kept.rows,
            key=lambda row: -float(np.abs(row.p - row.q)[row.counted].mean()),
        )
        self._chosen: list[_Chosen] = []
        tokens = 0
        for row in by_mismatch:
            if not self._chosen or tokens + len(row.ids) <= _TOKENS:
                self._chosen.append(_Chosen(row, row.q if self.side == "rollout" else row.p))
                tokens += len(row.ids)

    def __iter__(self) -> Iterator[Tried]:
        """Yield what was tried, the likeliest first; end after one that holds."""
        is_rounding = self.mismatch <= ROUNDINGS * self.rounding
        all_groups = (self._sampling, self._rounding, self._positions)
        groups = (self._rounding,) if is_rounding else all_groups
        for group in (self._sampling,) if self.is_constant else groups:
            for tried in group():
                yield tried
                if tried.holds(self.rounding):
                    return

    # --- temperature, top_p, top_k ----------------------------------------------------------

    def _sampling(self) -> Iterator[Tried]:
        self.on_progress("trying temperatures, top_p and top_k")
        logits: list[Float32] = []
        ids: list[int] = []
        target: list[Float64] = []
        left = _FIT_TOKENS
        for row, values in self._chosen:
            places = np.flatnonzero(row.counted)
            places = places[np.linspace(0, len(places) - 1, min(left, len(places))).astype(int)]
            places = np.unique(places)
            indices = [row.start + int(at) for at in places]
            found = self.model.logits_at(row.ids, indices)
            count = min(len(indices), max(CELLS // found.shape[1] - sum(map(len, logits)), 0))
            logits.append(found[:count])
            ids += [row.ids[index] for index in indices[:count]]
            target.append(values[places[:count]])
            left -= count
            if left <= 0 or count < len(indices):
                break
        plain = Logits(np.concatenate(logits), np.array(ids, np.int64))
        values = np.concatenate(target)
        was = float(np.abs(plain.log_probs - values).mean())
        fit = plain.fit(values, self.kept.sampling)
        sampling = fit.sampling
        whose = f"The {self.side}'s log-probs are"
        if sampling.cuts:
            cut = f"top_p {sampling.top_p:g}" if sampling.top_p < 1 else f"top_k {sampling.top_k}"
            text = f"{whose} processed (temperature {sampling.temperature:.3g}, {cut})"
            kind = "processed"
        else:
            text = f"{whose} at temperature {sampling.temperature:.3g}"
            kind = "temperature"
        other = "trainer's" if self.side == "rollout" else "rollout's"
        text += f", and the {other} are raw"
        yield Tried(kind, self.side, text, was, fit.mean, len(values))

    # --- rounding ---------------------------------------------------------------------------

    def _rounding(self) -> Iterator[Tried]:
        self.on_progress("trying the head and the log-softmax in other dtypes")
        whose = f"The {self.side}'s"
        base, replace = self.base, dataclasses.replace
        variants = [
            ("head_rounding", f"{whose} head is rounded to bfloat16",
             replace(base, head="bfloat16")),
            ("head_rounding", f"{whose} head is rounded to float16",
             replace(base, head="float16")),
            ("softmax_rounding", f"{whose} log-softmax is computed in bfloat16",
             replace(base, softmax="bfloat16")),
            ("softmax_rounding", f"{whose} head and log-softmax are computed in bfloat16",
             replace(base, head="bfloat16", softmax="bfloat16")),
        ]  # fmt: skip
        if not self.is_float32:
            text = f"{whose} head is computed in float32, and the other side's is rounded"
            variants = [("head_rounding", text, replace(base, head="float32")), *variants[2:]]
        plain = self._error(_always(self.base))
        for kind, text, variant in variants:
            now = self._error(_always(variant))
            yield Tried(kind, self.side, text, plain, now, self._count())

    # --- positions --------------------------------------------------------------------------

    def _positions(self) -> Iterator[Tried]:
        self.on_progress("trying shifted position ids")
        plain = self._error(_always(self.base))
        named: Mapping[str, Callable[[Row], int]] = {
            "of the response": lambda row: row.start,
            "after the first token": lambda row: 1,
            "of all tokens": lambda row: 0,
        }
        restarted = self._error(
            lambda row: dataclasses.replace(self.base, shift=-row.start, shift_from=row.start)
        )
        text = f"The {self.side}'s position ids begin at 0 again in the response"
        tried = Tried("positions", self.side, text, plain, restarted, self._count())
        yield tried
        if tried.holds(self.rounding):
            return
        first = self._chosen[:1]
        for by in _STEPS:
            # One row tells which place is the best: then all rows are scored.
            errors = {name: self._error(self._moved(by, at), first) for name, at in named.items()}
            error, index = self._best_place(by, first)
            name = min(errors, key=errors.__getitem__)
            begin = named[name]
            if error < errors[name] / 2:
                name, begin = f"from token {index} of the sequence on", _always_at(index)
            text = f"The {self.side}'s position ids {name} are shifted by {by:+d}"
            now = self._error(self._moved(by, begin))
            tried = Tried("positions", self.side, text, plain, now, self._count())
            yield tried
            if tried.holds(self.rounding):
                return

    def _best_place(self, by: int, chosen: Sequence[_Chosen]) -> tuple[float, int]:
        """Return the error of the best index of a common shift, and that index."""
        end = max(len(row.ids) for row, _ in chosen)
        errors: dict[int, float] = {}

        def error(index: int) -> float:
            if index not in errors:
                errors[index] = self._error(self._moved(by, _always_at(index)), chosen)
            return errors[index]

        step = max(end // _PLACES, 1)
        best = min(range(1, end, step), key=error)
        while step > 1:
            step = (step + 1) // 2
            best = min((max(best - step, 1), best, min(best + step, end - 1)), key=error)
        return error(best), best

    # --- errors -----------------------------------------------------------------------------

    def _error(
        self, variant: Callable[[Row], Variant], chosen: Sequence[_Chosen] | None = None
    ) -> float:
        """Return the mean |difference| of a variant to the side's recorded log-probs."""
        gaps = []
        for row, target in self._chosen if chosen is None else chosen:
            scores = self.model.score_as(row.ids, variant(row))
            gaps.append(np.abs(np.array(scores[row.start :]) - target)[row.counted])
        return float(np.concatenate(gaps).mean())

    def _count(self) -> int:
        return sum(int(row.counted.sum()) for row, _ in self._chosen)

    def _moved(self, by: int, begin: Callable[[Row], int]) -> Callable[[Row], Variant]:
        return lambda row: dataclasses.replace(self.base, shift=by, shift_from=begin(row))


def _always(variant: Variant) -> Callable[[Row], Variant]:
    return lambda row: variant


def _always_at(index: int) -> Callable[[Row], int]:
    return lambda row: index
