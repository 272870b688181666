"""Summaries as bytes: a compressed safetensors file, in which one tensor is a JSON document.

Input is untrusted: sizes, names, dtypes, shapes and indexes are validated before use.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from stagescope_service.statistics import cell as cells
from stagescope_service.statistics import profiles
from stagescope_service.statistics.cell import Array, Float64, Int64
from stagescope_service.statistics.histogram import Histogram
from stagescope_service.statistics.kernel import ROW
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_service.statistics.summary import (
    Produced,
    Sequences,
    Slices,
    Summary,
    Tokens,
)
from stagescope_wire.errors import InvalidInput, InvalidTensor
from stagescope_wire.nonfinite import Json
from stagescope_wire.tensorfile import encode_tensors, parse

VERSION: Final = 1
_DOCUMENT: Final = "document"
"""The tensor that holds the JSON document: as metadata it would have to fit into a header."""
_LEVEL: Final = 1
"""Compression level: most of a summary are empty cells, and higher levels save little more."""
_MOST_BYTES: Final = 1 << 30
"""A summary that decompresses to more is refused."""

Arrays = dict[str, Array]
Document = dict[str, Json]
"""A file's JSON document; readers validate it by use and report errors."""


def save(arrays: Arrays, document: Document) -> bytes:
    """Return arrays and a JSON document as the compressed bytes of a safetensors file."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    tensors = {**arrays, _DOCUMENT: np.frombuffer(text, np.uint8)}
    header, buffers, _ = encode_tensors(
        {name: (str(array.dtype), array.shape, array, None) for name, array in tensors.items()}, {}
    )
    return zlib.compress(b"".join([header, *buffers]), _LEVEL)


def load(data: bytes, kind: str, version: int) -> tuple[Arrays, Document]:
    """Read bytes written by `save` with `document['kind'] == kind`; the arrays are views.

    Raises:
        InvalidInput: other bytes, another kind or another version.
    """
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, _MOST_BYTES)
        if not stream.eof or stream.unused_data:
            raise ValueError(f"cut off, or more than {_MOST_BYTES} bytes")
        tensors = parse(np.frombuffer(plain, np.uint8), f"this {kind}").tensors
        document = json.loads(tensors.pop(_DOCUMENT)[2].tobytes())
    except (InvalidTensor, zlib.error, ValueError, KeyError) as error:
        raise _unreadable(kind, f"{type(error).__name__}: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise _unreadable(kind, "the document is of something else")
    if document.get("version") != version or document.get("cell") != cells.VERSION:
        raise _unreadable(
            kind, f"versions {document.get('version')!r} and {document.get('cell')!r}"
        )
    return {name: tensor[2] for name, tensor in tensors.items()}, document


def _unreadable(kind: str, why: str) -> InvalidInput:
    return InvalidInput(
        f"these bytes are no {kind} ({why})", expected=f"a {kind} of version {VERSION}"
    )


def summary_to_bytes(summary: Summary) -> bytes:
    """Return a summary as the bytes of `save`."""
    arrays, document = flatten(summary)
    return save(arrays, document)


def summary_from_bytes(data: bytes) -> Summary:
    """Read bytes written by `summary_to_bytes`; they are untrusted.

    Raises:
        InvalidInput: malformed bytes, or another version.
    """
    return restore(*load(data, "summary", VERSION))


def rounds_from_bytes(data: bytes) -> Slices:
    """Read only the cells by round of the bytes written by `summary_to_bytes`.

    A picture of a thousand ranks needs no more, and checking the rest takes most of the time.

    Raises:
        InvalidInput: malformed bytes, or another version.
    """
    arrays, _ = load(data, "summary", VERSION)
    try:
        return _slices(_Checked(arrays), "rounds")
    except (KeyError, ValueError) as error:
        raise _unreadable("summary", f"{type(error).__name__}: {error}") from error


def flatten(summary: Summary) -> tuple[Arrays, Document]:
    """Split a summary into arrays and a JSON document."""
    sequences, histogram = summary.sequences, summary.histogram
    arrays: Arrays = {
        "histogram": np.stack([histogram.rounds, histogram.buckets, histogram.counts]),
        "sequence_rows": np.stack([sequences.source, sequences.row]),
        "sequence_placed": sequences.placed.astype(np.uint8),
        "sequence_values": sequences.values,
        "sequence_cover": sequences.cover,
        "sequence_marks": sequences.marks,
        "sequence_mark_values": sequences.mark_values,
    }
    for name in ("rounds", "turns", "staleness"):
        slices: Slices = getattr(summary, name)
        arrays[f"{name}_keys"], arrays[f"{name}_cells"] = slices.keys, slices.cells
    for name in ("worst", "non_finite", "unequal"):
        tokens: Tokens = getattr(summary, name)
        arrays[f"{name}_where"] = np.stack([getattr(tokens, c) for c in Tokens.COLUMNS[:5]])
        arrays[f"{name}_values"] = np.stack([tokens.p, tokens.q])
    arrays["profile_keys"] = summary.profiles.keys
    arrays["profile_values"] = summary.profiles.values
    if summary.engines:
        arrays["engine_values"] = np.stack([*summary.engines.values()])
    document = {
        "kind": "summary",
        "version": VERSION,
        "cell": cells.VERSION,
        "pair": list(summary.pair),
        "settings": summary.settings.to_json(),
        "dtypes": {stream: list(dtypes) for stream, dtypes in summary.dtypes.items()},
        "produced": produced_to_json(summary.produced),
        "samples": list(sequences.samples) if any(sequences.samples) else None,
        "sources": list(summary.sources),
        "empty_samples": list(summary.empty_samples),
        "unnamed_empty": summary.unnamed_empty,
        "versions": list(summary.versions),
        "version_names": [[code, text] for code, text in summary.version_names.items()],
        "left_out": dict(summary.left_out),
        "ignored": list(summary.ignored),
        "engines": list(summary.engines),
        "token_digest": summary.token_digest,
    }
    return arrays, document


def restore(arrays: Arrays, document: Document) -> Summary:
    """Rebuild a summary from the result of `flatten`.

    Raises:
        InvalidInput: an array is missing, has another dtype or shape, or is out of range.
    """
    try:
        return _restore(_Checked(arrays), document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable("summary", f"{type(error).__name__}: {error}") from error


Scalar = TypeVar("Scalar", bound=np.generic)


class _Checked:
    """Arrays by name, validated for dtype and shape (None is any size)."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def get(self, name: str, dtype: type[Scalar], *shape: int | None) -> npt.NDArray[Scalar]:
        array = self._arrays[name]
        fits = array.ndim == len(shape) and all(
            size is None or size == actual for size, actual in zip(shape, array.shape, strict=True)
        )
        if array.dtype != np.dtype(dtype) or not fits:
            raise ValueError(f"{name} is {array.dtype} {array.shape}, not {shape}")
        return cast("npt.NDArray[Scalar]", array)


def _indexes(values: Int64, below: int, name: str) -> Int64:
    if values.size and (int(values.min()) < 0 or int(values.max()) >= below):
        raise ValueError(f"{name} points outside")
    return values


def _restore(arrays: _Checked, document: Document) -> Summary:
    values = arrays.get("sequence_values", np.float64, None, len(ROW))
    count = len(values)
    samples = document["samples"] if document["samples"] is not None else [""] * count
    sources = tuple(str(name) for name in document["sources"])
    if len(samples) != count:
        raise ValueError(f"{len(samples)} samples for {count} sequences")
    rows = arrays.get("sequence_rows", np.int64, 2, count)
    cover = arrays.get("sequence_cover", np.int64, None, 3)
    _indexes(cover[:, 0], count, "sequence_cover")
    marks = arrays.get("sequence_marks", np.int64, None, 3)
    _indexes(marks[:, 0], count, "sequence_marks")
    sequences = Sequences(
        samples=tuple(str(sample) for sample in samples),
        source=_indexes(rows[0], len(sources), "source"),
        row=rows[1],
        placed=arrays.get("sequence_placed", np.uint8, count, 2).astype(bool),
        values=values,
        cover=cover,
        marks=marks,
        mark_values=arrays.get("sequence_mark_values", np.float32, len(marks)),
    )
    p, q = (str(stream) for stream in document["pair"])
    rounds = _slices(arrays, "rounds")
    return Summary(
        pair=(p, q),
        settings=StatisticsSettings(**document["settings"]),
        dtypes={str(k): tuple(str(d) for d in v) for k, v in document["dtypes"].items()},
        rounds=rounds,
        turns=_slices(arrays, "turns"),
        staleness=_slices(arrays, "staleness"),
        histogram=Histogram(*arrays.get("histogram", np.int64, 3, None)),
        worst=_tokens(arrays, "worst", count),
        non_finite=_tokens(arrays, "non_finite", count),
        sequences=sequences,
        sources=sources,
        empty_samples=tuple(str(sample) for sample in document["empty_samples"]),
        unnamed_empty=int(document["unnamed_empty"]),
        versions=tuple(int(version) for version in document["versions"]),
        unequal=_tokens(arrays, "unequal", count),
        produced=produced_from_json(document["produced"]),
        ignored=tuple(str(name) for name in document["ignored"]),
        left_out={str(why): int(n) for why, n in document["left_out"].items()},
        profiles=_profiles(arrays),
        engines=_engines(arrays, [str(name) for name in document["engines"]]),
        version_names={int(code): str(text) for code, text in document["version_names"]},
        token_digest=str(document["token_digest"]),
    )


def _engines(arrays: _Checked, names: list[str]) -> dict[str, Float64]:
    if not names:
        return {}
    values = arrays.get("engine_values", np.float64, len(names), profiles.WIDTH)
    return dict(zip(names, values, strict=True))


def _profiles(arrays: _Checked) -> profiles.Profiles:
    keys = _indexes(arrays.get("profile_keys", np.int64, None), profiles.ROWS, "profile_keys")
    if keys.size > 1 and not bool((np.diff(keys) > 0).all()):
        raise ValueError("profile_keys are not ascending")
    values = arrays.get("profile_values", np.float64, len(keys), profiles.WIDTH)
    if not bool((values[:, :2] >= 0).all()):
        raise ValueError("profile_values count fewer than 0 tokens")
    return profiles.Profiles(keys, values)


def produced_to_json(produced: Produced) -> list[list[object]]:
    """Return the tokens by producers as built-in types."""
    return [[p, q, tokens] for (p, q), tokens in produced.items()]


def produced_from_json(rows: Iterable[Sequence[Any]]) -> dict[tuple[str, str], int]:
    """Return the inverse of `produced_to_json`."""
    return {(str(p), str(q)): int(tokens) for p, q, tokens in rows}


def _slices(arrays: _Checked, name: str) -> Slices:
    keys = arrays.get(f"{name}_keys", np.int64, None)
    if keys.size > 1 and not bool((np.diff(keys) > 0).all()):
        raise ValueError(f"{name} are not ascending")
    return Slices(keys, arrays.get(f"{name}_cells", np.float64, len(keys), cells.WIDTH))


def _tokens(arrays: _Checked, name: str, sequences: int) -> Tokens:
    where = arrays.get(f"{name}_where", np.int64, len(Tokens.COLUMNS) - 2, None)
    _indexes(where[0], sequences, name)
    values = arrays.get(f"{name}_values", np.float64, 2, where.shape[1])
    return Tokens(*where, *values)
