"""How payloads describe a log-prob stream: its dtype, producer, engine and sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, TypeAlias

from stagescope_service.core.catalogue_rows import integer, number, text
from stagescope_service.statistics.token_batch import producer_of
from stagescope_service.store.tables import PayloadRow
from stagescope_wire.names import MAX_ID
from stagescope_wire.nonfinite import Json
from stagescope_wire.tensors import STREAM_TENSORS

StreamValues: TypeAlias = "dict[tuple[str, str], dict[str, list[Json]]]"
"""(stage, stream) -> attribute -> its distinct values, in a fixed order."""


def streams_of_payloads(
    rows: Iterable[PayloadRow], replaced: Collection[tuple[str, int | None]]
) -> StreamValues:
    """Return how a step's payloads describe the streams that they hold.

    Args:
        rows: the rows of the step's payloads.
        replaced: (incarnation, seq) of payloads that later work replaced.
    """
    found: dict[tuple[str, str], dict[str, dict[str, Json]]] = {}
    for row in rows:
        tensors = row["tensors"] or {}
        if (row["incarnation"], row["seq"]) in replaced:
            continue
        for stream, name in STREAM_TENSORS.items():
            if name not in tensors:
                continue
            said = stream_attributes(row["meta"] or {}, stream)
            declared = tensors[name]
            if isinstance(declared, list) and declared and isinstance(declared[0], str):
                said["dtype"] = declared[0]
            own = found.setdefault((row["stage"], stream), {})
            for attribute, value in said.items():
                own.setdefault(attribute, {}).setdefault(repr(value), value)
    return {
        key: {name: [values[each] for each in sorted(values)] for name, values in own.items()}
        for key, own in found.items()
    }


def stream_attributes(meta: Mapping[str, object], stream: str) -> dict[str, Json]:
    """Return the known attributes of a stream: its own ones (`streams`), else the payload's."""
    streams = meta.get("streams")
    own = streams.get(stream) if isinstance(streams, Mapping) else None
    reported = {**meta, **(own if isinstance(own, Mapping) else {})}
    if (producer := producer_of(meta, stream)) is not None:
        reported["producer"] = producer
    found: dict[str, Json] = {}
    for name, read in _ATTRIBUTES.items():
        if (value := read(reported.get(name))) is not None:
            found[name] = value
    return found


def _short_text(value: object) -> str | None:
    return text(value, MAX_ID) if isinstance(value, str) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


_ATTRIBUTES: Final[Mapping[str, Callable[[object], Json]]] = {
    "producer": _short_text, "engine": _short_text, "engine_version": _short_text,
    "quantisation": _short_text, "processed": _flag, "temperature": number, "top_p": number,
    "top_k": integer, "alignment": _short_text, "routing": _short_text,
}  # fmt: skip
"""Attribute -> its value in the catalogue; None where it is of another type."""
