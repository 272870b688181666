"""Evidence of the turns of trajectories: what a prompt begins with, and whether a turn trains."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from stagescope_service.rules.evidence import Evidence, Example, not_found, not_measured, short
from stagescope_service.rules.history import NEWEST, READ, RunHistory
from stagescope_service.statistics.cell import Float64, Int64
from stagescope_wire.batch import Batch
from stagescope_wire.batch.converters import keys_of, response_spans, run_length, unpadded_prompts

_TURNS: Final = (("prompts", "responses", "turn_ids"), ("tokens", "loss_mask", "turn_ids"))
"""The tensors with the tokens of a turn and of its prompt, in either layout."""


def retokenised(history: RunHistory, *, share: float) -> Evidence:
    """Return whether the prompt of a turn does not begin with the turn before it.

    Rows of one group_id and run_id are turns of one trajectory if each row has a single turn_id.
    The newest `READ` steps with kept tokens are read; `share` of their follow-up prompts must
    differ.
    """
    if history.kept is None:
        return not_measured("tensors cannot be read here")
    pairs, read, earliest = 0, 0, 0
    breaks: list[tuple[int, int, int, _Turn, _Turn]] = []
    for step in reversed(history.steps[-NEWEST:]):
        batches = (history.kept.batch(step, names) for names in _TURNS)
        batch = next((each for each in batches if each is not None), None)
        if batch is None:
            continue
        read, earliest = read + 1, step.step
        for before, after in _following(batch):
            pairs += 1
            at = _first_difference(before, after)
            if at is not None:
                breaks.append((after.turn, at, step.step, before, after))
        if read == READ:
            break
    if not read:
        return not_measured("no prompts and responses are kept of the newest steps")
    if not pairs:
        return not_measured(
            "each row holds a whole trajectory, or one whose other turns are absent"
        )
    text = (
        f"{len(breaks)} of {pairs} prompts of later turns, in {read} steps, do not begin with the "
        "turn before"
    )
    if not breaks or len(breaks) < share * pairs:
        return not_found(text)
    turn, at, step_number, before, after = min(breaks, key=lambda each: each[:3])
    first = (
        f"first in turn {turn} at position {at} (step {step_number}, group {after.group}, run "
        f"{after.run}): token {_id_at(after.given, at)} where turn {before.turn} has "
        f"{_id_at(before.left[0], at)}"
    )
    around = (
        f"ids around it: {_ids_from(after.given, at)} in the prompt of turn {turn}, "
        f"{_ids_from(before.left[0], at)} in turn {before.turn}"
    )
    since = _since(history, min(each[2] for each in breaks), earliest)
    where = f"turn {turn}, position {at}"
    example = Example(step_number, after.sample) if after.sample else None
    return Evidence(
        "found", len(breaks) / pairs, since, where, (text, first, around), example=example
    )


def _since(history: RunHistory, first: int, earliest: int) -> int | None:
    """Return the first step with a break; None: steps before it were not read, and may have one."""
    return None if first == earliest > history.steps[0].step else first


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
            if not rows or rows < 0.5 * lost * of:
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
        is_at_once = sizes[at - 1] > 0.8 * usual and largest <= usual - 2.0 * spread
        is_low = largest <= factor * usual and (is_at_once or is_beyond)
        if usual > 0.0 and is_large and is_low:
            return at
    return None


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


class _Turn(NamedTuple):
    """A row that holds one turn of a trajectory; arrays of token ids."""

    group: str
    run: str
    sample: str
    """Its id; "": it has none."""
    turn: int
    given: Int64
    """The begin of the turn: its prompt, or all tokens of the row."""
    left: tuple[Int64, ...]
    """The expected begin of the next turn: prompt and response; two if padding is uncertain."""


def _following(batch: Batch) -> Iterator[tuple[_Turn, _Turn]]:
    """Yield each pair of turns that follow each other in a trajectory."""
    by_run: dict[tuple[str, str], dict[int, _Turn]] = {}
    again: set[tuple[str, str]] = set()
    for row in _turns(batch):
        key = (row.group, row.run)
        if row.turn in by_run.setdefault(key, {}):
            again.add(key)  # which of them the next turn follows is not known
        by_run[key][row.turn] = row
    for key, turns in by_run.items():
        if key not in again:
            yield from pairwise(turns[number] for number in sorted(turns))


def _turns(batch: Batch) -> Iterator[_Turn]:
    """Yield the rows of a batch that have a group and tokens of one turn alone."""
    ids = batch["turn_ids"].reshape(batch.rows, -1).astype(np.int64)
    last = ids.max(axis=1, initial=-1)
    is_single = ((ids == last[:, None]) | (ids < 0)).all(axis=1) & (last >= 0)
    prompts = unpadded_prompts(batch)
    if prompts is None:
        on = batch["loss_mask"] != 0
        ends = np.where(on.any(axis=1), on.shape[1] - on[:, ::-1].argmax(axis=1), 0)
        begins = np.zeros_like(ends)
    else:
        begins, ends = response_spans(batch)
    samples = batch.sample_ids or ("",) * batch.rows
    for row, (group, run) in enumerate(keys_of(batch)):
        if not (group and is_single[row]):
            continue
        if prompts is None:
            whole = batch["tokens"][row].astype(np.int64)
            yield _Turn(group, run, samples[row], int(last[row]), whole, (whole[: ends[row]],))
            continue
        prompt = prompts[row].astype(np.int64)
        written = batch["responses"][row, begins[row] : ends[row]].astype(np.int64)
        without = prompt[: len(prompt) - run_length(prompt[::-1])]
        ways = (prompt,) if "prompts" in batch.lengths else (prompt, without)
        left = tuple(np.concatenate([way, written]) for way in ways)
        yield _Turn(group, run, samples[row], int(last[row]), prompt, left)


def _first_difference(before: _Turn, after: _Turn) -> int | None:
    """Return the position where a turn does not continue the one before; None: it does."""
    found = []
    for left in before.left:
        shared = min(len(left), len(after.given))
        differ = np.flatnonzero(left[:shared] != after.given[:shared])
        if not len(differ) and len(left) <= len(after.given):
            return None
        found.append(int(differ[0]) if len(differ) else shared)
    return max(found)


def _ids_from(ids: Int64, position: int) -> str:
    ids = ids[max(position - 2, 0) : position + 4]
    return f"[{', '.join(map(str, ids.tolist()))}]"


def _id_at(ids: Int64, position: int) -> str:
    return str(ids[position]) if position < len(ids) else "no token"
