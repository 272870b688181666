"""Summaries as bytes: a compressed safetensors file, in which one tensor is a JSON document.

Input is untrusted: sizes, names, dtypes, shapes and indexes are validated before use.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar, cast, get_type_hints

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from stagescope_service.statistics import cell as cells
from stagescope_service.statistics import profile_bins as profiles
from stagescope_service.statistics.cell import Array, Float64, Int64
from stagescope_service.statistics.histogram import Histogram
from stagescope_service.statistics.routing import TOKEN_COLUMNS, Routing, WorstRoutes
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_service.statistics.summary import Produced, Sequences, Slices, Summary, Tokens
from stagescope_wire.errors import InvalidInput, InvalidTensor
from stagescope_wire.nonfinite import Json
from stagescope_wire.tensorfile import encode_tensors, parse
from stagescope_wire.tensors import ROUTING_COLUMNS

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
ProducedRows = list[tuple[str, str, int]]
"""Tokens by their producers: (producer of p, producer of q, tokens)."""


class JsonFields:
    """Fields of a class that a document holds as they are; their annotations validate them."""

    def __init__(self, kind: type, *names: str) -> None:
        hints = get_type_hints(kind)
        self._adapters: dict[str, TypeAdapter[Any]] = {n: TypeAdapter(hints[n]) for n in names}

    def to_json(self, value: object) -> Document:
        """Return the fields of a value."""
        return {name: getattr(value, name) for name in self._adapters}

    def from_json(self, document: Document) -> dict[str, Any]:
        """Return the fields in a document.

        Raises:
            KeyError: a field is missing.
            ValueError: a field has another type.
        """
        return {n: adapter.validate_python(document[n]) for n, adapter in self._adapters.items()}


_SUMMARY: Final = JsonFields(
    Summary, "pair", "dtypes", "sources", "empty_samples", "unnamed_empty", "versions",
    "left_out", "ignored", "token_digest",
)  # fmt: skip


def save(kind: str, version: int, arrays: Arrays, document: Document) -> bytes:
    """Return arrays and a JSON document as the compressed bytes of a safetensors file."""
    document = {"kind": kind, "version": version, "cell": cells.VERSION, **document}
    text = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    tensors = {**arrays, _DOCUMENT: np.frombuffer(text, np.uint8)}
    header, buffers, _ = encode_tensors(
        {name: (str(array.dtype), array.shape, array, None) for name, array in tensors.items()}, {}
    )
    return zlib.compress(b"".join([header, *buffers]), _LEVEL)


def load(data: bytes, kind: str, version: int) -> tuple[Arrays, Document]:
    """Read bytes written by `save`; the arrays are views.

    Raises:
        InvalidInput: other bytes, another kind or another version.
    """
    stream = zlib.decompressobj()
    with refusing(kind):
        plain = stream.decompress(data, _MOST_BYTES)
        if not stream.eof or stream.unused_data:
            raise ValueError(f"cut off, or more than {_MOST_BYTES} bytes")
        tensors = parse(np.frombuffer(plain, np.uint8), f"this {kind}").tensors
        document = json.loads(tensors.pop(_DOCUMENT)[2].tobytes())
        if not isinstance(document, dict) or document.get("kind") != kind:
            raise ValueError("the document describes something else")
        versions = document.get("version"), document.get("cell")
        if versions != (version, cells.VERSION):
            raise ValueError("versions {!r} and {!r}".format(*versions))
    return {name: tensor[2] for name, tensor in tensors.items()}, document


@contextlib.contextmanager
def refusing(kind: str) -> Iterator[None]:
    """Turn the errors of reading untrusted bytes into one that names what they should be.

    Raises:
        InvalidInput: the block met malformed bytes.
    """
    try:
        yield
    except (
        InvalidTensor, zlib.error, KeyError, TypeError, ValueError, AttributeError,
    ) as error:  # fmt: skip
        raise InvalidInput(
            f"these bytes are not a {kind} ({type(error).__name__}: {error})",
            expected=f"a {kind} of version {VERSION}",
        ) from error


def summary_to_bytes(summary: Summary) -> bytes:
    """Return a summary as the bytes of `save`."""
    return save("summary", VERSION, *flatten(summary))


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
    with refusing("summary"):
        return _slices(_Checked(arrays), "rounds")


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
    if (routing := summary.routing) is not None:
        arrays["routing_counts"], arrays["routing_tokens"] = routing.counts, routing.tokens
        arrays["routing_same"] = routing.same
        arrays["routing_worst_at"] = routing.worst.where
        arrays["routing_worst"] = routing.worst.routes
    if summary.engines:
        arrays["engine_values"] = np.stack([*summary.engines.values()])
    return arrays, _SUMMARY.to_json(summary) | {
        "settings": summary.settings.to_json(),
        "produced": produced_to_json(summary.produced),
        "samples": sequences.samples if any(sequences.samples) else None,
        "version_names": [*summary.version_names.items()],
        "engines": [*summary.engines],
    }


def restore(arrays: Arrays, document: Document) -> Summary:
    """Rebuild a summary from the result of `flatten`.

    Raises:
        InvalidInput: an array is missing, has another dtype or shape, or is out of range.
    """
    with refusing("summary"):
        return _restore(_Checked(arrays), document)


Scalar = TypeVar("Scalar", bound=np.generic)


class _Checked:
    """Arrays by name, validated for dtype and shape (None is any size)."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays

    def has(self, name: str) -> bool:
        """Return whether there is such an array."""
        return name in self._arrays

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
    plain = _SUMMARY.from_json(document)
    values = arrays.get("sequence_values", np.float64, None, len(ROW))
    count = len(values)
    samples = [""] * count if document["samples"] is None else document["samples"]
    if len(samples) != count:
        raise ValueError(f"{len(samples)} samples for {count} sequences")
    rows = arrays.get("sequence_rows", np.int64, 2, count)
    cover = arrays.get("sequence_cover", np.int64, None, 3)
    marks = arrays.get("sequence_marks", np.int64, None, 3)
    _indexes(cover[:, 0], count, "sequence_cover")
    _indexes(marks[:, 0], count, "sequence_marks")
    sequences = Sequences(
        samples=tuple(map(str, samples)),
        source=_indexes(rows[0], len(plain["sources"]), "source"),
        row=rows[1],
        placed=arrays.get("sequence_placed", np.uint8, count, 2).astype(bool),
        values=values,
        cover=cover,
        marks=marks,
        mark_values=arrays.get("sequence_mark_values", np.float32, len(marks)),
    )
    return Summary(
        **plain,
        settings=StatisticsSettings(**document["settings"]),
        sequences=sequences,
        histogram=Histogram(*arrays.get("histogram", np.int64, 3, None)),
        rounds=_slices(arrays, "rounds"),
        turns=_slices(arrays, "turns"),
        staleness=_slices(arrays, "staleness"),
        worst=_tokens(arrays, "worst", count),
        non_finite=_tokens(arrays, "non_finite", count),
        unequal=_tokens(arrays, "unequal", count),
        produced=produced_from_json(document["produced"]),
        profiles=_profiles(arrays),
        routing=_routing(arrays, count),
        engines=_engines(arrays, [*map(str, document["engines"])]),
        version_names={int(code): str(text) for code, text in document["version_names"]},
    )


def _engines(arrays: _Checked, names: list[str]) -> dict[str, Float64]:
    if not names:
        return {}
    values = arrays.get("engine_values", np.float64, len(names), profiles.WIDTH)
    return dict(zip(names, values, strict=True))


def _routing(arrays: _Checked, sequences: int) -> Routing | None:
    if not arrays.has("routing_counts"):
        return None
    same = arrays.get("routing_same", np.int64, None, None)
    counts = arrays.get("routing_counts", np.int64, None, len(ROUTING_COLUMNS))
    _indexes(counts[:, 0], len(same), "routing_counts")
    where = arrays.get("routing_worst_at", np.int64, None, 2)
    _indexes(where[:, 0], sequences, "routing_worst_at")
    routes = arrays.get("routing_worst", np.int16, len(where), 2, None, None)
    tokens = arrays.get("routing_tokens", np.int64, None, len(TOKEN_COLUMNS))
    return Routing(counts, tokens, same, WorstRoutes(where, routes))


def _profiles(arrays: _Checked) -> profiles.Profiles:
    keys = _indexes(_ascending(arrays, "profile_keys"), profiles.ROWS, "profile_keys")
    values = arrays.get("profile_values", np.float64, len(keys), profiles.WIDTH)
    if not bool((values[:, :2] >= 0).all()):
        raise ValueError("profile_values count fewer than 0 tokens")
    return profiles.Profiles(keys, values)


def produced_to_json(produced: Produced) -> ProducedRows:
    """Return the tokens by producers as built-in types."""
    return [(p, q, tokens) for (p, q), tokens in produced.items()]


def produced_from_json(rows: Iterable[tuple[str, str, int]]) -> dict[tuple[str, str], int]:
    """Return the inverse of `produced_to_json`."""
    return {(str(p), str(q)): int(tokens) for p, q, tokens in rows}


def _ascending(arrays: _Checked, name: str) -> Int64:
    keys = arrays.get(name, np.int64, None)
    if keys.size > 1 and not bool((np.diff(keys) > 0).all()):
        raise ValueError(f"{name} are not ascending")
    return keys


def _slices(arrays: _Checked, name: str) -> Slices:
    keys = _ascending(arrays, f"{name}_keys")
    return Slices(keys, arrays.get(f"{name}_cells", np.float64, len(keys), cells.WIDTH))


def _tokens(arrays: _Checked, name: str, sequences: int) -> Tokens:
    where = arrays.get(f"{name}_where", np.int64, len(Tokens.COLUMNS) - 2, None)
    _indexes(where[0], sequences, name)
    values = arrays.get(f"{name}_values", np.float64, 2, where.shape[1])
    return Tokens(*where, *values)
