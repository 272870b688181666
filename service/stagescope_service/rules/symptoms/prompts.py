"""Evidence of the prompts of later turns: whether each begins with the turn before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.rules.evidence import Evidence, Example, not_found, not_measured
from stagescope_service.rules.history import NEWEST, READ, RunHistory
from stagescope_service.statistics.cell import Int64
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
