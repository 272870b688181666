"""Joins two streams of the same samples from different processes. Arrays in and out.

An engine records the rollout's log-probs of a sample in one row or several (a partial rollout
continues under a later version). A trainer records rows, or context-parallel pieces of rows. Tokens
are matched by sample and position if both sides have positions. Otherwise they are matched in the
order of the model's tokens if both sides have equally many, else by position in the row. If both
sides have token ids, a row whose ids differ is not aligned.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stagescope_service.rows.positions import TokenIndex
from stagescope_service.rows.ragged import Bools, Int64, cumulative, row_of_each, slice_indexes
from stagescope_service.statistics import TokenBatch, WireTensor
from stagescope_service.statistics.summarise import widened
from stagescope_service.statistics.token_batch import PROCESS
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.policy_versions import merge_names

MISSING: Final = "no rollout of the sample"
UNALIGNED: Final = "other positions"
OTHER_TOKENS: Final = "other tokens"
CONTRADICTING: Final = "rollouts of one id that contradict each other"
_RECOMPUTED: Final = 0.1
"""Most nats between two records of one token's log-prob."""

_ROLLOUT: Final = "rollout_log_probs"


@dataclasses.dataclass(frozen=True)
class RolloutRows:
    """The model's tokens of some rows of one payload; row r is `offsets[r]:offsets[r + 1]`.

    Attributes:
        samples: sample_uid of each row.
        positions: int64 [tokens], in the sample where `placed`, else in the row.
        placed: whether the payload has positions (or token_offset).
        q: [tokens] log-probs of `dtype` (bfloat16 as uint16).
        token_ids, versions: int64 [tokens], or None if not recorded.
        age: higher is newer; if a position is repeated, the newest counts.
        producer: the producer of q, if the payload names it.
        incarnation: the process that recorded it.
        engines: the engine instance of each row; None: the process is one.
        version_names: the texts of versions that are texts.
    """

    samples: tuple[str, ...]
    offsets: Int64
    positions: Int64
    placed: bool
    q: npt.NDArray[Any]
    dtype: str
    token_ids: Int64 | None
    versions: Int64 | None
    age: tuple[int, int] = (0, 0)
    producer: str | None = None
    incarnation: str = ""
    engines: tuple[str, ...] | None = None
    version_names: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Joined:
    """A trainer's batch with the rollout's stream.

    Attributes:
        batch: with q, and with versions if only the rollout has them.
        left_out: rows that must not count.
        why: `MISSING`, `UNALIGNED`, `OTHER_TOKENS` or `CONTRADICTING` for the left-out rows with
            model tokens.
    """

    batch: TokenBatch
    left_out: tuple[int, ...]
    why: Mapping[int, str]

    @property
    def skip(self) -> npt.NDArray[np.uint8]:
        """[tokens], 1 where a token must not count."""
        return skip_rows(self.batch, self.left_out)

    @property
    def tokens_left_out(self) -> dict[str, int]:
        """Reason -> tokens under the mask of rows that do not count."""
        offsets, found = self.batch.row_offsets, Counter[str]()
        for row, why in self.why.items():
            own = self.batch.mask[offsets[row] : offsets[row + 1]]
            found[why] += int((own == self.batch.mask_one).sum())
        return dict(found)


def skip_rows(batch: TokenBatch, rows: Collection[int]) -> npt.NDArray[np.uint8]:
    """Return the `skip` array [tokens] that leaves out complete rows."""
    lengths = np.diff(batch.row_offsets)
    chosen = np.isin(np.arange(batch.rows), np.fromiter(rows, np.int64, len(rows)))
    return np.repeat(chosen, lengths).astype(np.uint8)


def rollout_rows(
    tensors: Mapping[str, WireTensor],
    strings: Mapping[str, Sequence[str]],
    meta: JsonObject,
    wanted: Collection[str],
    age: tuple[int, int] = (0, 0),
) -> RolloutRows | None:
    """Return the rows of an engine's payload with requested samples; None if there is none.

    Without a response_mask all tokens of ragged rows are the model's.

    Raises:
        InvalidTensor: shapes or dtypes do not fit, or padded rows have no mask.
    """
    batch = stream_of(_masked(tensors), strings, meta, "rollout")
    ids = batch.sample_ids or ()
    mine = np.array([sample in wanted for sample in ids], bool)
    if not mine.any():
        return None
    row = row_of_each(batch.row_offsets)
    at = np.flatnonzero((batch.mask == batch.mask_one) & mine[row])
    row = row[at]
    chosen = np.flatnonzero(mine)
    counts = np.bincount(row, minlength=batch.rows)[chosen]
    return RolloutRows(
        samples=tuple(ids[index] for index in chosen),
        offsets=cumulative(counts),
        positions=batch.positions_of(at, row),
        placed=batch.has_positions,
        q=batch.q[at],
        dtype=batch.q_dtype,
        token_ids=None if batch.token_ids is None else batch.token_ids[at].astype(np.int64),
        versions=_versions(batch, row, at),
        age=age,
        producer=batch.producers[0],
        engines=None if batch.engines is None else tuple(batch.engines[index] for index in chosen),
        version_names=batch.version_names,
    )


def stream_of(
    tensors: Mapping[str, WireTensor],
    strings: Mapping[str, Sequence[str]],
    meta: JsonObject,
    stream: str,
) -> TokenBatch:
    """Return a payload of one stream as a batch; q is the same stream.

    Raises:
        InvalidTensor: shapes or dtypes do not fit, or there is no response_mask.
    """
    return TokenBatch.from_tensors(tensors, strings, meta, pair=(stream, stream))


def join(batch: TokenBatch, found: Sequence[RolloutRows], *, split: bool = False) -> Joined:
    """Add the rollout's stream to a trainer's batch.

    Args:
        batch: a batch of one stream (`stream_of`), with sample ids.
        found: rows of the same samples, from any number of payloads.
        split: rows are context-parallel pieces: their tokens are not in the sample's order.

    Raises:
        InvalidTensor: positions outside of any sample.
    """
    rollout = _Rollout.from_rows(found)
    at = np.flatnonzero(batch.mask == batch.mask_one)
    row = row_of_each(batch.row_offsets)[at]
    counts = np.bincount(row, minlength=batch.rows)
    code = np.array([rollout.codes.get(s, -1) for s in batch.sample_ids or ()], np.int64)
    if batch.sample_ids is None:
        code = np.full(batch.rows, -1, np.int64)
    known = code >= 0
    ids = None if batch.token_ids is None else batch.token_ids[at].astype(np.int64)
    aligned, source = _aligned(batch, rollout, at, code, split=split)
    use = aligned[row]
    source = source[use]
    other = np.zeros(batch.rows, bool)
    if ids is not None and rollout.token_ids is not None:
        differ = (rollout.token_ids[source] != ids[use]) & rollout.has_ids[code[row[use]]]
        other = np.bincount(row[use][differ], minlength=batch.rows) > 0
    q = np.zeros(batch.tokens, rollout.q.dtype)
    q[at[use]] = rollout.q[source]
    versions, names = batch.versions, dict(batch.version_names)
    if versions is None and rollout.versions is not None:
        versions = np.zeros(batch.tokens, np.int64)
        versions[at[use]] = rollout.versions[source]
        names = merge_names(rows.version_names for rows in found)
    mixed = known & rollout.mixed[code]
    left = np.flatnonzero((counts > 0) & (~aligned | other | mixed))
    # A piece without model tokens does not make its sample one without a rollout.
    out = np.union1d(left, np.flatnonzero(~known))
    return Joined(
        batch=dataclasses.replace(
            batch,
            pair=(batch.pair[0], "rollout"),
            q=q,
            q_dtype=rollout.dtype,
            versions=versions,
            version_names=names,
            engines=batch.engines or _engines(batch.sample_ids, found),
        ),
        left_out=tuple(int(index) for index in out),
        why={
            int(index): MISSING
            if not known[index]
            else CONTRADICTING
            if mixed[index]
            else (OTHER_TOKENS if other[index] else UNALIGNED)
            for index in left
        },
    )


def _aligned(
    batch: TokenBatch, rollout: _Rollout, at: Int64, code: Int64, *, split: bool
) -> tuple[Bools, Int64]:
    """Return whether each row is aligned, and the rollout's token of each of the model's tokens.

    Args:
        batch: of the trainer.
        rollout: the tokens to find.
        at: the model's tokens.
        code: the sample of each row among the rollout's; -1: unknown.
        split: as in `join`.
    """
    row = row_of_each(batch.row_offsets)[at]
    counts = np.bincount(row, minlength=batch.rows)
    source, hit = rollout.index.find(code[row], batch.positions_of(at, row))
    found = (code >= 0) & (np.bincount(row[~hit], minlength=batch.rows) == 0)
    placed = batch.has_positions
    sure = found & placed & rollout.placed[code]
    as_many = (code >= 0) & (counts == rollout.sizes[code])
    order = as_many & ~sure & ~np.full(batch.rows, split and placed)
    has_ids = (batch.token_ids is not None) & rollout.has_ids[code]
    in_order = slice_indexes(rollout.starts[code[order]], counts[order])
    source[order[row]] = rollout.tokens[in_order]
    return sure | order | (found & has_ids), source


def _engines(samples: Sequence[str] | None, found: Sequence[RolloutRows]) -> tuple[str, ...] | None:
    """Return the engine instances that sampled these samples; a resumed one may have several."""
    if samples is None:
        return None
    names: dict[str, set[str]] = {}
    for rows in found:
        own = rows.engines or (f"{PROCESS}{rows.incarnation}",) * len(rows.samples)
        for sample, engine in zip(rows.samples, own, strict=True):
            names.setdefault(sample, set()).add(engine)
    return tuple(", ".join(sorted(names.get(sample, ()))) for sample in samples)


@dataclasses.dataclass(frozen=True)
class _Rollout:
    """Tokens of many payloads, by (sample, position), each position once."""

    codes: dict[str, int]
    index: TokenIndex
    tokens: Int64
    """Its tokens, by sample and position."""
    starts: Int64
    """[samples + 1 unknown one]: the first of each among `tokens`."""
    sizes: Int64
    placed: Bools
    has_ids: Bools
    mixed: Bools
    """[samples + 1]: whether payloads of one version hold other tokens at the same positions."""
    q: npt.NDArray[Any]
    dtype: str
    token_ids: Int64 | None
    versions: Int64 | None

    @classmethod
    def from_rows(cls, found: Sequence[RolloutRows]) -> _Rollout:
        """Merge payloads; if a position is repeated, the newest counts."""
        ordered = sorted(found, key=lambda rows: rows.age)
        codes = {s: i for i, s in enumerate(dict.fromkeys(s for r in ordered for s in r.samples))}
        code = _joined([_codes(rows, codes) for rows in ordered])
        position = _joined([rows.positions for rows in ordered])
        index = TokenIndex.build(code, position, len(codes))
        mixed = np.zeros(len(codes) + 1, bool)
        mixed[code[index.repeats[0]][_contradict(ordered, index.repeats)]] = True
        tokens = index.tokens
        # One more entry of each, for unknown samples (code -1).
        sizes = np.bincount(code[tokens], minlength=len(codes) + 1)
        placed, has_ids = np.ones(len(codes) + 1, bool), np.ones(len(codes) + 1, bool)
        placed[-1] = has_ids[-1] = False
        for rows in ordered:
            own = [codes[sample] for sample in rows.samples]
            placed[own] &= rows.placed
            has_ids[own] &= rows.token_ids is not None
        dtypes = sorted({rows.dtype for rows in ordered})
        same = len(dtypes) == 1
        q = [rows.q if same else widened(rows.q, rows.dtype) for rows in ordered]
        has_versions = bool(ordered) and all(rows.versions is not None for rows in ordered)
        ids = [np.full(len(r.q), -1) if r.token_ids is None else r.token_ids for r in ordered]
        return cls(
            codes=codes,
            index=index,
            tokens=tokens,
            starts=cumulative(sizes)[:-1],
            sizes=sizes,
            placed=placed,
            has_ids=has_ids,
            mixed=mixed,
            q=np.concatenate(q) if q else np.empty(0, np.float32),
            dtype=dtypes[0] if same else ("float64" if dtypes else "float32"),
            token_ids=_joined(ids) if has_ids.any() else None,
            versions=_joined([r.versions for r in ordered]) if has_versions else None,
        )


def _contradict(ordered: Sequence[RolloutRows], repeats: Int64) -> Bools:
    """Return, for tokens at a repeated position, whether the next one is a different token.

    Under a later version it may be: an aborted sample was generated again.
    """
    one, other = repeats
    version = _joined([np.full(len(rows.q), rows.age[0]) for rows in ordered])
    payload = _joined([np.full(len(rows.q), rows.age[1]) for rows in ordered])
    ids = _joined([np.full(len(r.q), -1) if r.token_ids is None else r.token_ids for r in ordered])
    q = np.concatenate([np.empty(0), *(widened(rows.q, rows.dtype) for rows in ordered)])
    known = (ids[one] >= 0) & (ids[other] >= 0)
    differ = np.where(known, ids[one] != ids[other], abs(q[one] - q[other]) > _RECOMPUTED)
    found: Bools = (version[one] == version[other]) & (payload[one] != payload[other]) & differ
    return found


def _codes(rows: RolloutRows, codes: Mapping[str, int]) -> Int64:
    own = np.array([codes[sample] for sample in rows.samples], np.int64)
    return np.repeat(own, np.diff(rows.offsets))


def _joined(arrays: Sequence[Int64 | None]) -> Int64:
    there = [array for array in arrays if array is not None]
    return np.concatenate(there).astype(np.int64) if there else np.empty(0, np.int64)


def _versions(batch: TokenBatch, row: Int64, at: Int64) -> Int64 | None:
    if batch.versions is None:
        version = batch.policy_version
        return None if version is None else np.full(len(at), version, np.int64)
    by_token = batch.versions.size == batch.tokens
    return (batch.versions[at] if by_token else batch.versions[row]).astype(np.int64)


def _masked(tensors: Mapping[str, WireTensor]) -> Mapping[str, WireTensor]:
    if "response_mask" in tensors or _ROLLOUT not in tensors:
        return tensors
    _, shape, buffer, offsets = tensors[_ROLLOUT]
    if offsets is None and "cu_seqlens" not in tensors:
        return tensors  # padded rows: their ends are unknown, and the batch reports it
    ones = np.ones(buffer.size, np.uint8)
    return {**tensors, "response_mask": ("uint8", shape, ones, offsets)}
