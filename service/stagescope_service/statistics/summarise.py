"""From a batch of tokens to its summary: find the segments, run the kernel, gather the rest."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from stagescope_service.rows.ragged import cumulative, row_of_each
from stagescope_service.statistics import blocks, kernel, segments
from stagescope_service.statistics import cell as cells
from stagescope_service.statistics import profile_bins as profiles
from stagescope_service.statistics.cell import Array, Float32, Float64, Int64, Mask, UInt8
from stagescope_service.statistics.histogram import Histogram
from stagescope_service.statistics.jit import announced
from stagescope_service.statistics.routing import Routing, WorstRoutes
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_service.statistics.summary import (
    MAX_ENGINES,
    UNKNOWN,
    Sequences,
    Slices,
    Summary,
    Tokens,
    ordered,
)
from stagescope_service.statistics.token_batch import TokenBatch
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.policy_versions import differ_in_number, is_numbered

_KINDS = {
    "float64": blocks.FLOAT64,
    "float32": blocks.FLOAT32,
    "bfloat16": blocks.BFLOAT16,
    "float16": blocks.FLOAT16,
}
_START, _STOP, _ROW, _ROUND, _TURN, _VERSION = range(6)

MAX_ROUNDS: Final = 4096
"""Maximum number of distinct rounds, turns and versions."""
_MARKS: Final = 8
"""Nominal marks on a row's grid: at least half as many for one run, at most twice as many."""
_MAX_STRETCHES: Final = 1024
"""Maximum stretches of a row: bounds the summary of a mask with very many short stretches."""


def summarise(
    batch: TokenBatch,
    settings: StatisticsSettings | None = None,
    *,
    skip: UInt8 | None = None,
    name: str = "",
) -> Summary:
    """Compute all statistics of a batch in one pass over its model tokens.

    Args:
        batch: The tokens.
        settings: How the run applies importance weights; by default it applies none.
        skip: uint8 [tokens], 1 where a token counts elsewhere. Rounds do not change.
        name: A name for this payload, shown if rows have no sample_uid.

    Raises:
        InvalidTensor: a mask value other than 0 and 1, or a negative round id.
    """
    settings = settings or StatisticsSettings()
    batch, ignored = _within_limits(batch)
    found = _segments(batch, skip)
    table = found.table
    every = table if skip is None else _segments(batch, None).table
    keys = _slice_keys(batch, table)
    rounds, turns, ages = (
        Slices(each, cells.empty(len(each))) for each in (keys.rounds, keys.turns, keys.ages)
    )
    row_values = np.zeros((batch.rows, len(ROW)))
    counts = np.zeros((len(keys.rounds), 2 * kernel.HISTOGRAM_HALF), np.uint32)
    profile = np.zeros((profiles.ROWS, profiles.WIDTH))
    (worst, worst_ids), (bad, bad_ids), (unequal, unequal_ids) = (
        (np.zeros((most, 3)), np.zeros((most, 2), np.int64))
        for most in (settings.worst, settings.worst, 1)
    )
    worst_used, bad_used, unequal_used = kernel.accumulate(
        batch.p.view(np.uint8), _KINDS[batch.p_dtype], batch.q.view(np.uint8),
        _KINDS[batch.q_dtype], table, keys.slots, _keys(batch, table),
        _placement(batch, table, every),
        settings.weight_rule(), rounds.cells, turns.cells, ages.cells, row_values, counts, profile,
        worst, worst_ids, bad, bad_ids, unequal, unequal_ids,
    )  # fmt: skip
    sequences, index = _sequences(batch, found, row_values)
    worst_tokens = _tokens(worst_ids[:worst_used], batch, table, index)
    routing = None if batch.routes is None else _routing(batch, table, every, index, profile)
    bad_tokens = _tokens(bad_ids[:bad_used], batch, table, index)
    p_producer, q_producer = batch.producers
    ids = batch.sample_ids or ()
    empty_samples = tuple(sorted({ids[row] for row in np.flatnonzero(index < 0)} if ids else ()))
    versions = () if batch.versions is None else tuple(np.unique(table[:, _VERSION]).tolist())
    return Summary(
        pair=batch.pair,
        settings=settings,
        dtypes={batch.pair[0]: (batch.p_dtype,), batch.pair[1]: (batch.q_dtype,)},
        rounds=rounds,
        turns=turns,
        staleness=ages,
        histogram=_histogram(keys.rounds, counts),
        worst=ordered(worst_tokens, sequences, by_d=True, keep=settings.worst),
        non_finite=ordered(bad_tokens, sequences, by_d=False, keep=settings.worst),
        sequences=sequences,
        sources=(name,),
        empty_samples=empty_samples,
        unnamed_empty=0 if batch.sample_ids is not None else batch.rows - len(sequences),
        versions=versions,
        version_names={v: text for v, text in batch.version_names.items() if v in versions},
        unequal=_tokens(unequal_ids[:unequal_used], batch, table, index),
        ignored=(*ignored, *keys.ignored),
        profiles=profiles.Profiles.of_table(profile),
        engines=_by_engine(batch, row_values),
        routing=routing,
        token_digest=_token_digest(batch, found.cover),
        produced={
            (p_producer or "", q_producer or ""): int(rounds.cells[:, cells.Field.TOKENS].sum())
        },
    )


def _histogram(rounds: Int64, counts: cells.UInt32) -> Histogram:
    """Return the sparse form of counts [rounds, buckets]."""
    row, bucket = np.nonzero(counts)
    found = counts[row, bucket].astype(np.int64)
    return Histogram(rounds[row], bucket - kernel.HISTOGRAM_HALF, found)


class _SliceKeys(NamedTuple):
    """The rounds, turns and staleness of a batch, and those of each segment."""

    rounds: Int64
    turns: Int64
    ages: Int64
    slots: Int64
    """[segments, 3]: index in `rounds`, `turns`, `ages`, or -1."""
    ignored: tuple[str, ...]
    """Tensors with more distinct values than the limit."""


def _slice_keys(batch: TokenBatch, table: Int64) -> _SliceKeys:
    """Return the slices of a batch; rounds beyond the limit are one (`table` is changed)."""
    ignored: tuple[str, ...] = ()
    if table.size and int(table[:, _ROUND].max()) >= MAX_ROUNDS:
        np.minimum(table[:, _ROUND], MAX_ROUNDS - 1, out=table[:, _ROUND])
        ignored = ("response_mask",)
    rounds, round_slots = np.unique(table[:, _ROUND], return_inverse=True)
    turns, turn_slots = _optional_slots(table[:, _TURN], batch.turn_ids is not None)
    if len(turns) > MAX_ROUNDS:  # each would have a cell
        turns, turn_slots = _optional_slots(table[:, _TURN], known=False)
        ignored = (*ignored, "turn_ids")
    has_ages = batch.policy_version is not None and batch.versions is not None
    has_ages = has_ages and all(map(is_numbered, batch.version_names))
    has_ages = has_ages and differ_in_number(batch.version_names.values())
    ages, age_slots = _optional_slots((batch.policy_version or 0) - table[:, _VERSION], has_ages)
    if len(ages) > MAX_ROUNDS:
        ages, age_slots = _optional_slots(table[:, _VERSION], known=False)
        ignored = (*ignored, "versions")
    slots = np.stack([round_slots.reshape(-1), turn_slots, age_slots], axis=1).astype(np.int64)
    return _SliceKeys(rounds, turns, ages, slots, ignored)


def _within_limits(batch: TokenBatch) -> tuple[TokenBatch, tuple[str, ...]]:
    """Return a batch without the tensors that exceed the limits, and their names.

    An unrelated id recorded as a round would make a step of 10^12 rounds. Rounds then follow from
    the mask.
    """
    ignored: tuple[str, ...] = ()
    if batch.round_ids is not None:
        on = batch.mask == batch.mask_one
        if int(np.max(batch.round_ids, where=on, initial=0)) >= MAX_ROUNDS:
            batch, ignored = dataclasses.replace(batch, round_ids=None), ("round_ids",)
    offsets = batch.round_offset
    if offsets is not None and ((offsets < 0) | (offsets >= MAX_ROUNDS)).any():
        batch, ignored = dataclasses.replace(batch, round_offset=None), (*ignored, "round_offset")
    return batch, ignored


def _segments(batch: TokenBatch, skip: UInt8 | None) -> segments.Segments:
    mask, one = batch.mask, batch.mask_one
    by_token = batch.versions is not None and batch.versions.size == batch.tokens
    columns = segments.TokenColumns(
        batch.positions, batch.round_ids, batch.turn_ids, batch.versions if by_token else None, skip
    )
    if mask.itemsize == 2 or (mask.itemsize > 1 and any(each is not None for each in columns)):
        mask, one = _narrow_mask(mask, one), 1
    find = functools.partial(
        segments.find,
        row_offsets=batch.row_offsets,
        token_offset=batch.token_offset,
        round_offset=batch.round_offset,
        columns=columns,
    )
    found = find(mask, one)
    if found.bad_mask >= 0 and one != 1:
        # -0.0 is a 0 with other bits: checked only if an unexpected pattern is found.
        found = find(_narrow_mask(mask, one), 1)
    if found.bad_round >= 0:
        ids = batch.round_ids
        raise InvalidTensor(
            f"round_ids holds {'?' if ids is None else ids[found.bad_round]} under the mask",
            expected="round numbers from 0",
        )
    if found.bad_mask >= 0:
        row = int(np.searchsorted(batch.row_offsets, found.bad_mask, "right")) - 1
        raise InvalidTensor(
            f"response_mask (row {row}) holds a value other than 0 and 1",
            expected="1 = model token, 0 = environment or padding",
        )
    if batch.versions is not None and not by_token:
        found.table[:, _VERSION] = batch.versions[found.table[:, _ROW]]
    return found


def _narrow_mask(mask: Mask, one: int) -> UInt8:
    """Return the mask as uint8; an invalid value becomes 2, which is also invalid."""
    kind = mask.dtype.type
    off = mask == kind(0)
    if one != 1:  # of floats: their -0.0 is the sign bit alone
        off |= mask == kind(1 << (8 * mask.itemsize - 1))
    return np.where(mask == kind(one), 1, np.where(off, 0, 2)).astype(np.uint8)


def _optional_slots(values: Int64, known: bool) -> tuple[Int64, Int64]:
    if not known:
        return np.empty(0, np.int64), np.full(len(values), UNKNOWN, np.int64)
    keys, slots = np.unique(values, return_inverse=True)
    return keys, slots.reshape(-1)


def _keys(batch: TokenBatch, table: Int64) -> Int64:
    """Return for each segment the rank of its sample in order, and its first token's position."""
    row, start = table[:, _ROW], table[:, _START]
    order = row
    if batch.sample_ids is not None:
        ranks = {name: rank for rank, name in enumerate(sorted(set(batch.sample_ids)))}
        order = np.array([ranks[name] for name in batch.sample_ids], np.int64)[row]
    return np.stack([order, batch.positions_of(start, row)], axis=1).astype(np.int64)


def _by_engine(batch: TokenBatch, rows: Float64) -> dict[str, Float64]:
    """Return `profiles.COLUMNS` of the rows [rows, len(ROW)] of each engine instance."""
    if batch.engines is None or len(names := sorted(set(batch.engines))) > MAX_ENGINES:
        return {}
    index = {name: at for at, name in enumerate(names)}
    sums = np.zeros((len(names), profiles.WIDTH))
    names_of = ("tokens", "non_finite", "d_sum", "d_abs_sum", "pp_sum", "qq_sum", "pq_sum")
    n, bad, d, size, pp, qq, pq = (rows[:, ROW.index(name)] for name in names_of)
    squares = np.maximum(pp + qq - 2.0 * pq, d * d / np.maximum(n, 1.0))  # of small d the bound
    own = np.stack([n, bad, d, size, squares], axis=1)
    np.add.at(sums, [index[name] for name in batch.engines], own)
    return {name: row for name, row in zip(names, sums, strict=True) if row[:2].any()}


def _routing(
    batch: TokenBatch, table: Int64, every: Int64, index: Int64, profile: Float64
) -> Routing:
    """Return the agreement of a batch's routes, and add its tokens to the profile.

    `every` are the segments with the skipped tokens.
    """
    routes, length = batch.routes, table[:, _STOP] - table[:, _START]
    assert routes is not None
    bounds = cumulative(length)
    segment = row_of_each(bounds)
    at = np.arange(len(segment)) - bounds[segment] + table[segment, _START]
    p, q = widened(batch.p[at], batch.p_dtype), widened(batch.q[at], batch.q_dtype)
    with np.errstate(invalid="ignore"):
        profiles.add_routes(profile, routes.flips[at], p - q)
    counts = np.isin(routes.worst_at, at)
    token = routes.worst_at[counts]
    row = np.searchsorted(batch.row_offsets, token, "right") - 1
    where = np.stack([index[row], batch.positions_of(token, row)], axis=1).astype(np.int64)
    worst = WorstRoutes(where, routes.worst[counts])
    kept, sent = (
        np.bincount(each[:, _ROW], each[:, _STOP] - each[:, _START], batch.rows).astype(np.int64)
        for each in (table, every)
    )
    return Routing.of_payload(routes, at, table[segment, _ROUND], (kept, sent), worst)


def _placement(batch: TokenBatch, table: Int64, every: Int64) -> Int64:
    """Return where segments lie in their rounds, int64 [segments, 3], see `kernel.accumulate`.

    `every` are the segments without a skipped token. The begin and end of a round are unknown in a
    piece of a sample: it may continue in another one.
    """
    start, stop, row = every[:, _START], every[:, _STOP], every[:, _ROW]
    follows = batch.continues(start, row)  # segments of a round, by turn or version
    follows[1:] &= (start[1:] == stop[:-1]) & (every[1:, _ROUND] == every[:-1, _ROUND])
    follows[:1] = False
    heads = np.flatnonzero(~follows)
    first, row = start[heads], row[heads]
    past = stop[np.append(heads[1:], len(every)) - 1] if len(heads) else first
    last = np.zeros(len(heads), np.int64)
    last[np.append(row[1:] != row[:-1], True)[: len(row)]] = profiles.LAST
    known_first, known_last = np.ones(len(heads), bool), np.ones(len(heads), bool)
    if batch.has_positions:
        last[last == profiles.LAST] = profiles.UNKNOWN
        known_first = batch.positions_of(first, row) == 0
        known_first |= batch.continues(first, row)
        known_last = batch.continues(past, row)
    run = np.searchsorted(first, table[:, _START], "right") - 1
    place = np.where(known_first[run], table[:, _START] - first[run], UNKNOWN)
    behind = np.where(known_last[run], past[run] - 1 - table[:, _START], UNKNOWN)
    return np.stack([place, behind, last[run]], axis=1)


def _sequences(
    batch: TokenBatch, found: segments.Segments, values: Float64
) -> tuple[Sequences, Int64]:
    """Return the rows that have model tokens, and each row's index among them."""
    row_of_segment = found.table[:, _ROW]
    rows = row_of_segment[np.diff(row_of_segment, prepend=-1) > 0]
    index = np.full(batch.rows, UNKNOWN, np.int64)
    index[rows] = np.arange(len(rows))
    cover = found.cover.copy()
    cover[:, 0] = index[cover[:, 0]]
    named = batch.sample_ids is not None
    marks, mark_values = _marks(batch, cover) if named else (np.empty((0, 3), np.int64), None)
    ids = batch.sample_ids
    rounds = batch.round_ids is not None or batch.round_offset is not None
    return Sequences(
        samples=tuple(ids[row] for row in rows) if ids is not None else ("",) * len(rows),
        source=np.zeros(len(rows), np.int64),
        row=rows,
        placed=np.tile(np.array([batch.has_positions, rounds]), (len(rows), 1)),
        values=values[rows],
        cover=_limited(cover),
        marks=marks,
        mark_values=np.empty(0, np.float32) if mark_values is None else mark_values,
    ), index


def _token_digest(batch: TokenBatch, cover: Int64) -> str:
    """Return a hash of the model tokens' ids and positions if rows have no sample ids."""
    if batch.sample_ids is not None or batch.token_ids is None or not len(cover):
        return ""
    _, first, last, token = cover.T
    bounds = cumulative(last - first)
    run = row_of_each(bounds)
    ids = batch.token_ids[np.arange(len(run)) - bounds[run] + token[run]]
    hashed = hashlib.blake2b(digest_size=16)
    hashed.update(np.ascontiguousarray(cover[:, :3]).tobytes())
    hashed.update(ids.astype(np.int64).tobytes())
    return hashed.hexdigest()


def _marks(batch: TokenBatch, cover: Int64) -> tuple[Int64, Float32]:
    """Return marks: tokens that every copy of a sample keeps, to distinguish it from others.

    They are the row's first and last model tokens, and those at multiples of a power of two. The
    power depends on the extent of the row: for two rows with the same positions the coarser grid is
    a subset of the finer one.

    Returns:
        int64 [marks, 3]: sequence, position, token id (or `UNKNOWN`); float32 [marks]: their q.
    """
    sequence, first, last, token = cover.T
    begins = np.flatnonzero(np.diff(sequence, prepend=-1))
    if not len(begins):
        return np.empty((0, 3), np.int64), np.empty(0, np.float32)
    low, high = (at.reduceat(x, begins) for at, x in ((np.minimum, first), (np.maximum, last)))
    extent = np.maximum((high.astype(np.float64) - low) / _MARKS, 1.0)
    stride = (1 << np.ceil(np.log2(extent)).astype(np.int64))[sequence]
    count = np.maximum(-(-last // stride) + (first // -stride), 0)
    # A row with repeated positions has more: the first ones suffice.
    before = cumulative(count)[:-1]
    count = np.minimum(count, np.maximum(2 * _MARKS - (before - before[begins][sequence]), 0))
    bounds = cumulative(count)
    run = row_of_each(bounds)
    number = np.arange(len(run)) - bounds[run]
    position = (number - (first // -stride)[run]) * stride[run]
    ends = np.append(begins[1:], len(cover)) - 1
    run = np.concatenate([begins, run, ends])
    position = np.concatenate([first[begins], position, last[ends] - 1])
    order = np.argsort(sequence[run], kind="stable")
    run, position = run[order], position[order]
    at = token[run] + position - first[run]
    ids = np.full(len(at), UNKNOWN) if batch.token_ids is None else batch.token_ids[at]
    marks = np.stack([sequence[run], position, ids.astype(np.int64)], axis=1)
    with np.errstate(over="ignore"):
        return marks, widened(batch.q[at], batch.q_dtype).astype(np.float32)


def _limited(cover: Int64) -> Int64:
    """Return [stretches, 3] of a cover [stretches, 4]; excess stretches of a row are merged."""
    sequence = cover[:, 0]
    begins = np.flatnonzero(np.diff(sequence, prepend=-1))
    number = np.arange(len(cover)) - np.repeat(begins, np.diff(np.append(begins, len(cover))))
    limited = np.ascontiguousarray(cover[:, :3])
    if not (number >= _MAX_STRETCHES).any():
        return limited
    limited[:, 2] = np.where(
        number == _MAX_STRETCHES - 1,
        np.maximum.reduceat(limited[:, 2], begins)[sequence],
        limited[:, 2],
    )
    return limited[number < _MAX_STRETCHES]


def _tokens(ids: Int64, batch: TokenBatch, table: Int64, index: Int64) -> Tokens:
    token, segment = ids[:, 0], table[ids[:, 1]]
    unknown = np.full(len(token), UNKNOWN, np.int64)
    return Tokens(
        sequence=index[segment[:, _ROW]],
        position=batch.positions_of(token, segment[:, _ROW]),
        round=segment[:, _ROUND],
        turn=segment[:, _TURN],
        token_id=unknown if batch.token_ids is None else batch.token_ids[token].astype(np.int64),
        p=widened(batch.p[token], batch.p_dtype),
        q=widened(batch.q[token], batch.q_dtype),
    )


def widened(values: Array, dtype: str) -> Float64:
    """Return log-probs of any accepted dtype (bfloat16 as uint16) as float64."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def warm(compiling: Callable[[], None] = lambda: None) -> None:
    """Compile all loops, or load them from disk: half a minute first, then under one second.

    Args:
        compiling: called before anything is compiled.
    """
    values, offsets = np.array([-0.5, -1.0], np.float32), np.array([0, 2], np.int64)
    with announced(compiling):
        for mask in (np.uint8, np.uint32, np.uint64):
            batch = TokenBatch(
                pair=("old", "rollout"), p=values, p_dtype="float32", q=values, q_dtype="float32",
                mask=np.array([1, 0], mask), mask_one=1, row_offsets=offsets,
            )  # fmt: skip
            summarise(batch)
        summarise(batch, skip=np.zeros(2, np.uint8))
