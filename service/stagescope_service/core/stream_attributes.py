"""What a payload's metadata says of a log-prob stream: its producer, engine and sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from stagescope.wire.names import MAX_ID
from stagescope.wire.nonfinite import Json
from stagescope_service.core.catalogue_rows import integer, number, text
from stagescope_service.statistics.payload import producer_of


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
