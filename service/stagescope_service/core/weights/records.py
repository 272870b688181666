"""Records of weights between the wire, the catalogue and the comparison.

A row of `weights` holds eight bytes a tensor. Names, dtypes, shapes and shards are the same in
every version and are stored once, in `weight_manifests`, under their digest.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from stagescope_service.core.catalogue_rows import integer, text
from stagescope_service.core.entities import Process
from stagescope_service.core.instructions import Put
from stagescope_service.core.weights.verdicts import (
    COPY,
    TP_COPY,
    Shard,
    WeightRecord,
    WeightTensor,
)
from stagescope_wire.errors import InvalidEvent
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import WEIGHT_KINDS, WEIGHT_SIDES, Event, Work

if TYPE_CHECKING:
    from stagescope_service.store.tables import WeightsRow

MAX_TENSORS: Final = 1_000_000
_MANIFESTS_REMEMBERED: Final = 10_000
_EXPECTED: Final = "[(name, checksum, dtype, shape, shard), ...]"


class ReportedWeights(NamedTuple):
    """The fields of a WEIGHTS event."""

    version: int
    side: str
    kind: str
    tensors: list[WeightTensor]
    checksums: list[int | None]
    device: JsonObject


class Manifests:
    """Digests of the manifests that the store already has."""

    def __init__(self) -> None:
        self._recognized: dict[str, None] = {}

    def add(self, manifest: str) -> bool:
        """Add a digest; return whether it is new."""
        if manifest in self._recognized:
            return False
        self._recognized[manifest] = None
        if len(self._recognized) > _MANIFESTS_REMEMBERED:
            del self._recognized[next(iter(self._recognized))]
        return True


def read(event: Event, work: Work) -> ReportedWeights:
    """Read a WEIGHTS event.

    Raises:
        InvalidEvent: a field cannot be read.
    """
    fields = event.fields
    side, kind, tensors = fields.get("side"), fields.get("kind"), fields.get("tensors")
    if work.policy_version is None:
        raise InvalidEvent(f"weights event {event.seq} has no policy_version", expected="an int")
    if side not in WEIGHT_SIDES or kind not in WEIGHT_KINDS:
        raise InvalidEvent(
            f"weights event {event.seq} is of side {side!r:.100} and kind {kind!r:.100}",
            expected=f"one of {WEIGHT_SIDES}, and of {WEIGHT_KINDS}",
        )
    if not isinstance(tensors, list | tuple) or len(tensors) > MAX_TENSORS:
        raise InvalidEvent(f"weights event {event.seq} has no tensors", expected=_EXPECTED)
    device = fields.get("device")
    reported = ReportedWeights(
        work.policy_version, side, kind, [], [], device if isinstance(device, Mapping) else {}
    )
    for entry in tensors:
        tensor, checksum = _tensor(entry)
        reported.tensors.append(tensor)
        reported.checksums.append(checksum)
    return reported


def _tensor(entry: Json) -> tuple[WeightTensor, int | None]:
    try:
        name, checksum, dtype, shape, shard = entry[:5]
        if not isinstance(name, str) or not name:
            raise TypeError
        if checksum is not None and not 0 <= int(checksum) < 1 << 64:
            raise ValueError
        tensor = WeightTensor(
            text(name) or "", text(dtype, 100) or "", _sizes(shape), _shard(shard)
        )
        return tensor, None if checksum is None else int(checksum)
    except (TypeError, ValueError, OverflowError):
        raise InvalidEvent(f"a weight is {entry!r:.200}", expected=_EXPECTED) from None


def _sizes(value: Json) -> tuple[int, ...]:
    sizes = tuple(integer(size) for size in value)
    if any(size is None or size < 0 for size in sizes):
        raise ValueError
    return tuple(size for size in sizes if size is not None)


def _shard(value: Json) -> Shard | str | None:
    if value is None or value in (COPY, TP_COPY):
        return None if value is None else str(value)
    if isinstance(value, str):
        raise TypeError
    shape, offsets, placement, dims = value
    return Shard(
        _sizes(shape),
        None if offsets is None else _sizes(offsets),
        text(placement, 1000) or "",
        tuple(text(name, 100) or "" for name in dims),
    )


def put(
    process: Process, event: Event, work: Work, reported: ReportedWeights, manifests: Manifests
) -> list[Put]:
    """Return the row of a record, and the row of its manifest if it is new."""
    known = [checksum is not None for checksum in reported.checksums]
    body = json.dumps([reported.tensors, known], separators=(",", ":")).encode()
    manifest = hashlib.blake2b(body, digest_size=16).hexdigest()
    checksums = [checksum or 0 for checksum in reported.checksums]
    row = {
        "incarnation": process.incarnation,
        "seq": event.seq,
        "attempt_id": process.attempt_id,
        "step": work.step,
        "version": reported.version,
        "side": reported.side,
        "kind": reported.kind,
        "role": process.role,
        "rank": process.rank,
        "wall": event.wall,
        "checksums": struct.pack(f"<{len(checksums)}Q", *checksums),
        "manifest": manifest,
        "device_kind": text(reported.device.get("device_kind"), 100),
        "device_index": integer(reported.device.get("device_index")),
        "device_serial": text(reported.device.get("device_serial"), 200),
    }
    out = [Put("weights", row)]
    if manifests.add(manifest):
        out.append(Put("weight_manifests", {"manifest": manifest, "tensors": zlib.compress(body)}))
    return out


def manifest_of(blob: bytes) -> tuple[tuple[WeightTensor, ...], list[bool]]:
    """Return the tensors of a manifest, and which of them have checksums."""
    tensors, known = json.loads(zlib.decompress(blob))
    return tuple(_tensor((name, None, *rest))[0] for name, *rest in tensors), known


def record_of(
    row: WeightsRow,
    manifest: tuple[Sequence[WeightTensor], Sequence[bool]],
    layout: Mapping[str, object],
) -> WeightRecord:
    """Return the record of a row."""
    tensors, known = manifest
    checksums = struct.unpack(f"<{len(tensors)}Q", row["checksums"])
    return WeightRecord(
        role=row["role"],
        rank=row["rank"],
        side=row["side"],
        kind=row["kind"],
        version=row["version"],
        step=row["step"],
        order=(row["wall"], row["incarnation"], row["seq"]),
        tensors=tensors,
        checksums=[found if there else None for found, there in zip(checksums, known, strict=True)],
        layout=layout,
    )
