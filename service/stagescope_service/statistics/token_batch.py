"""The kernel's input: flat tokens, validated.

Padded `[rows, tokens]`, packed `[tokens]` with `cu_seqlens`, and ragged rows with offsets all
become flat views and `row_offsets`. Contiguous arrays are not copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from stagescope_service.rows.positions import continues, positions_of
from stagescope_service.statistics.cell import Array, Bool, Int64, Mask
from stagescope_service.statistics.routing import TokenRoutes
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.names import misspelt
from stagescope_wire.policy_versions import names_of
from stagescope_wire.tensorfile import WireTensor
from stagescope_wire.tensors import CURRENT_ALONE, PAIRS, STREAM_TENSORS, UPDATE_PAIR

FLOATS: Final = ("float64", "float32", "bfloat16", "float16")
INTEGERS: Final = ("int64", "int32", "int16", "int8", "uint8", "bool")
_ONE_BITS: Final = {
    "float64": 0x3FF0 << 48, "float32": 0x3F80 << 16, "bfloat16": 0x3F80, "float16": 0x3C00,
}  # fmt: skip
_ALIASES: Final = {"ref_log_probs": "ref_log_prob"}
_SHAPES: Final = "[rows, tokens], [tokens] with cu_seqlens, or rows with offsets"


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Flat tokens of `rows` rows; row r is `row_offsets[r]:row_offsets[r + 1]`.

    Attributes:
        p, q: [tokens] log-probs of the trainer and of the rollout; bfloat16 as uint16.
        p_dtype, q_dtype: Their dtype tags.
        mask: uint8 to uint64 [tokens], the bit patterns of the mask; `mask_one`: that for 1.
        positions, round_ids, turn_ids, token_ids: int64 [tokens] or None (token_ids any int).
        versions: int64 [tokens] or [rows] or None.
        token_offset, round_offset: int64 [rows] or None.
        sample_ids: One sample_uid a row, or None.
        engines: The engine instance that sampled each row, or None.
        version_names: The texts of versions that are texts.
        policy_version: The trainer's, for staleness.
        producers: The producers of p and q; None where not reported.
        routes: What the payload says of the experts that rollout and trainer chose, or None.
        problems: The parts of the payload that were not read; its numbers do not need them.
    """

    pair: tuple[str, str]
    p: Array
    p_dtype: str
    q: Array
    q_dtype: str
    mask: Mask
    mask_one: int
    row_offsets: Int64
    positions: Int64 | None = None
    round_ids: Int64 | None = None
    turn_ids: Int64 | None = None
    token_ids: Array | None = None
    versions: Int64 | None = None
    token_offset: Int64 | None = None
    round_offset: Int64 | None = None
    sample_ids: tuple[str, ...] | None = None
    engines: tuple[str, ...] | None = None
    policy_version: int | None = None
    producers: tuple[str | None, str | None] = (None, None)
    version_names: Mapping[int, str] = dataclasses.field(default_factory=dict)
    routes: TokenRoutes | None = None
    problems: tuple[InvalidTensor, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows, including empty ones."""
        return len(self.row_offsets) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens, including masked ones."""
        return int(self.row_offsets[-1])

    @property
    def has_positions(self) -> bool:
        """Whether the payload says where its tokens lie in their samples."""
        return self.positions is not None or self.token_offset is not None

    def positions_of(self, token: Int64, row: Int64) -> Int64:
        """Return the positions of tokens in their samples; `row` has the row of each token."""
        return positions_of(token, row, self.row_offsets, self.positions, self.token_offset)

    def continues(self, token: Int64, row: Int64) -> Bool:
        """Return whether tokens, each of its `row`, follow the ones before them in the sample."""
        return continues(token, row, self.row_offsets, self.positions)

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, WireTensor],
        strings: Mapping[str, Sequence[str]] | None = None,
        meta: Mapping[str, object] | None = None,
        *,
        pair: tuple[str, str] = ("old", "rollout"),
    ) -> TokenBatch:
        """Validate a payload and view it as flat tokens.

        Raises:
            InvalidTensor: a stream or the mask is missing, widths differ, a dtype does not fit;
                the message names the tensor, the shapes and what was expected.
        """
        reader = _Reader(tensors)
        p_name, q_name = (_present(tensors, STREAM_TENSORS[stream]) for stream in pair)
        p, p_dtype, offsets = reader.tokens(p_name, FLOATS)
        q, q_dtype, _ = reader.tokens(q_name, FLOATS, like=(p_name, offsets))
        if "response_mask" not in tensors:
            similar = [
                name for name, suggestion in misspelt(tensors) if suggestion == "response_mask"
            ]
            raise InvalidTensor(
                f"response_mask is missing beside {p_name} and {q_name}",
                expected=f"response_mask of shape {tensors[p_name][1]}: 1 = model token",
                advice=f"rename {similar[0]}, which no statistic reads"
                if similar
                else "record it with the same call",
            )
        mask, mask_dtype, _ = reader.tokens(
            "response_mask", (*FLOATS, *INTEGERS), like=(p_name, offsets)
        )
        bits, one = mask_bits(mask, mask_dtype)
        like, rows = (p_name, offsets), len(offsets) - 1
        version = (meta or {}).get("policy_version")
        responses = reader.optional("responses", like)
        versions, problems = None, list[InvalidTensor]()
        try:
            versions = reader.versions(like)
        except InvalidTensor as error:  # the mismatch does not depend on them
            problems.append(error)
        routes = None
        try:
            if pair[1] == "rollout":
                routes = TokenRoutes.of_tensors(tensors, len(p), rows)
        except InvalidTensor as error:
            problems.append(error)
        return cls(
            pair=pair,
            p=p, p_dtype=p_dtype, q=q, q_dtype=q_dtype, mask=bits, mask_one=one,
            row_offsets=offsets,
            positions=_int64(reader.optional("positions", like)),
            round_ids=_int64(reader.optional("round_ids", like)),
            turn_ids=_int64(reader.optional("turn_ids", like)),
            token_ids=responses,
            versions=_int64(versions),
            version_names=names_of(meta),
            routes=routes,
            problems=tuple(problems),
            token_offset=reader.per_row("token_offset", rows),
            round_offset=reader.per_row("round_offset", rows),
            sample_ids=_row_ids(strings or {}, "sample_ids", rows),
            engines=_row_ids(strings or {}, "engine_ids", rows),
            policy_version=version if isinstance(version, int) else None,
            producers=(producer_of(meta, pair[0]), producer_of(meta, pair[1])),
        )  # fmt: skip


def available_pairs(names: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of `PAIRS` for which a payload has the tensors of both streams."""
    present = _streams_in(names)
    return tuple(pair for pair in PAIRS if present.issuperset(pair))


def update_pair(
    names: Mapping[str, object], strings: Mapping[str, object]
) -> tuple[str, str] | None:
    """Return the pair of streams that compares a first mini-batch's payload with the old log-probs.
    It is `UPDATE_PAIR`, or `CURRENT_ALONE` if the sample ids pair its sums with the sums of
    another stage; None: there is no such pair."""
    present = _streams_in(names)
    if "response_mask" not in names or "current" not in present:
        return None
    if "old" in present:
        return UPDATE_PAIR
    return CURRENT_ALONE if "rollout" not in present and strings.get("sample_ids") else None


def _streams_in(names: Mapping[str, object]) -> set[str]:
    return {
        stream
        for stream, name in STREAM_TENSORS.items()
        if name in names or _ALIASES.get(name) in names
    }


def mask_bits(mask: Array, dtype: str) -> tuple[Mask, int]:
    """Return a mask's bit patterns as unsigned integers, and the pattern of 1."""
    bits: Mask = mask.view(f"uint{8 * mask.dtype.itemsize}")
    return bits, _ONE_BITS.get(dtype, 1)


def _present(tensors: Mapping[str, WireTensor], name: str) -> str:
    alias = _ALIASES.get(name)
    return alias if name not in tensors and alias is not None and alias in tensors else name


def flat_values(
    tensors: Mapping[str, WireTensor], name: str, dtypes: tuple[str, ...]
) -> Array | None:
    """Return the values of a tensor, or of its other name; None if absent, or of another dtype."""
    name = _present(tensors, name)
    try:
        return _Reader({name: tensors[name]})._flat(name, dtypes)[0] if name in tensors else None
    except InvalidTensor:
        return None


def _int64(values: Array | None) -> Int64 | None:
    return None if values is None else values.astype(np.int64, copy=False)


def producer_of(meta: Mapping[str, object] | None, stream: str) -> str | None:
    """Return the producer of a stream from a payload's metadata, None if there is no such text.

    It is `streams[stream]["producer"]`, or `producers` by the stream's or its tensor's name.
    """
    meta = meta or {}
    streams, producers = meta.get("streams"), meta.get("producers")
    stream_meta = streams.get(stream) if isinstance(streams, Mapping) else None
    declared = [stream_meta.get("producer")] if isinstance(stream_meta, Mapping) else []
    if isinstance(producers, Mapping):
        declared += [producers.get(stream), producers.get(STREAM_TENSORS[stream])]
    return next((name for name in declared if isinstance(name, str) and name), None)


PROCESS: Final = "process "
"""Prefix of the incarnation of a process that stands for its engine instance or producer."""
EMPTY_ID: Final = "(empty)"
"""The id of a row whose id is an empty text."""


def _row_ids(strings: Mapping[str, Sequence[str]], name: str, rows: int) -> tuple[str, ...] | None:
    ids = strings.get(name)
    if ids is None:
        return None
    if len(ids) != rows:
        raise InvalidTensor(f"{name} has {len(ids)} entries", expected=f"one a row: {rows}")
    # A summary without ids has empty ones: several rows with an empty id contradict, as others do.
    return tuple(str(name) or EMPTY_ID for name in ids)


class _Reader:
    """Reads the tensors of one payload; its errors name tensor, shapes and expectation."""

    def __init__(self, tensors: Mapping[str, WireTensor]) -> None:
        self._tensors = tensors
        self._packed: Int64 | None = None
        if "cu_seqlens" in tensors:
            values = self._flat("cu_seqlens", INTEGERS)[0].astype(np.int64, copy=False)
            self._packed = _checked_offsets("cu_seqlens", values)

    def tokens(
        self, name: str, dtypes: tuple[str, ...], like: tuple[str, Int64] | None = None
    ) -> tuple[Array, str, Int64]:
        """Return (flat values, dtype tag, row offsets) of a tensor with one value a token."""
        flat, dtype, shape, offsets = self._flat(name, dtypes)
        if offsets is not None:
            offsets = _checked_offsets(name, offsets)
        elif self._packed is not None and (len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)):
            offsets = self._packed
        elif len(shape) == 2:
            offsets = np.arange(shape[0] + 1, dtype=np.int64) * shape[1]
        else:
            raise InvalidTensor(f"{name} has shape {shape}", expected=_SHAPES)
        if offsets[-1] != flat.size:
            raise InvalidTensor(
                f"{name} has {flat.size} values (shape {shape}), its rows end at {offsets[-1]}",
                expected="offsets (cu_seqlens) that end at the number of tokens",
            )
        if like is not None and not np.array_equal(offsets, like[1]):
            other = self._tensors[like[0]][1]
            raise InvalidTensor(
                f"{name} has shape {shape} where {like[0]} has {other}: "
                f"{_lengths(offsets)} against {_lengths(like[1])}",
                expected="the same rows, each as wide as in every tensor with one value a token",
                advice=f"slice or pad {name} as {like[0]} is",
            )
        return flat, dtype, offsets

    def optional(self, name: str, like: tuple[str, Int64]) -> Array | None:
        """Return the flat values of an integer tensor with one value per token, None if absent."""
        if name not in self._tensors:
            return None
        return self.tokens(name, INTEGERS, like)[0]

    def versions(self, like: tuple[str, Int64]) -> Array | None:
        """Return `versions`, one per token or per row, None if absent."""
        if "versions" in self._tensors:
            flat, _, shape, offsets = self._flat("versions", INTEGERS)
            rows = len(like[1]) - 1
            if len(shape) == 1 and offsets is None and flat.size == rows:
                return flat
            try:
                return self.optional("versions", like)
            except InvalidTensor as error:
                form = f"shape {shape}" + ("" if offsets is None else f": {_lengths(offsets)}")
                raise InvalidTensor(
                    f"versions has {form}, where {like[0]} has {_lengths(like[1])}: no token is "
                    "known to be of an older policy",
                    expected=f"one for each row [{rows}], or for each token",
                    advice="the other numbers of this payload count",
                ) from error
        return None

    def per_row(self, name: str, rows: int) -> Int64 | None:
        """Return an integer tensor [rows], None if absent."""
        if name not in self._tensors:
            return None
        flat, _, shape, _ = self._flat(name, INTEGERS)
        if flat.size != rows:
            raise InvalidTensor(f"{name} has shape {shape}", expected=f"[{rows}], one a row")
        return flat.astype(np.int64, copy=False)

    def _flat(
        self, name: str, dtypes: tuple[str, ...]
    ) -> tuple[Array, str, tuple[int, ...], Int64 | None]:
        if name not in self._tensors:
            raise InvalidTensor(
                f"{name} is missing", expected=f"beside {sorted(self._tensors)}: {_SHAPES}"
            )
        dtype, shape, buffer, offsets = self._tensors[name]
        if dtype not in dtypes:
            raise InvalidTensor(
                f"{name} (shape {tuple(shape)}) has dtype {dtype!r}",
                expected=f"one of {', '.join(dtypes)}",
            )
        stored = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        flat = np.ascontiguousarray(buffer).reshape(-1)
        if flat.dtype == np.uint8 and stored != np.uint8 and flat.nbytes % stored.itemsize == 0:
            flat = flat.view(stored) if flat.ctypes.data % stored.itemsize == 0 else flat
        if flat.dtype != stored:
            raise InvalidTensor(
                f"{name} is tagged {dtype} but its buffer is {flat.dtype}", expected=f"{stored}"
            )
        if flat.size != int(np.prod(shape, dtype=np.int64)):
            raise InvalidTensor(
                f"{name} has {flat.size} values for shape {tuple(shape)}",
                expected="as many values as the shape says",
            )
        if not flat.flags.aligned:
            flat = flat.copy()
        rows = None if offsets is None else np.asarray(offsets).astype(np.int64, copy=False)
        return flat, dtype, tuple(shape), rows


def _checked_offsets(name: str, offsets: Int64) -> Int64:
    offsets = np.ascontiguousarray(offsets.reshape(-1))
    if not offsets.size or offsets[0] != 0 or bool((np.diff(offsets) < 0).any()):
        raise InvalidTensor(
            f"the offsets of {name} are {offsets[:8].tolist()}{'...' if offsets.size > 8 else ''}",
            expected="[rows + 1] int64 that begin at 0 and never fall",
        )
    return offsets


def _lengths(offsets: Int64) -> str:
    lengths = np.diff(offsets)
    if lengths.size and bool((lengths == lengths[0]).all()):
        return f"{lengths.size} rows of {lengths[0]}"
    return f"{lengths.size} rows of {lengths[:6].tolist()}{'...' if lengths.size > 6 else ''}"
