"""Batches of events as one HTTP body, for processes that never join Ray.

`Content-Type: application/vnd.stagescope.events`, and the body is

    8 bytes   length N of the header, little-endian
    N bytes   JSON {"sender": [...], "events": [[...], ...], "payloads": {"<seq>": payload}}
    the rest  safetensors

with payload = `{"tensors": {name: {"dtype", "shape", "offsets": bool}}, "strings", "meta"}`. The
bytes of tensor `name` of event `seq` are the safetensors entry `{seq}/{name}`, its row offsets
(int64) `{seq}/{name}/offsets`. Non-finite numbers in JSON are the strings "nan", "inf", "-inf".

Written with numpy alone: a training image need not have safetensors.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from stagescope.tensorfile import CODES
from stagescope.wire.nonfinite import spell

Array: TypeAlias = "np.ndarray[Any, Any]"

MEDIA_TYPE: Final = "application/vnd.stagescope.events"


@dataclasses.dataclass(frozen=True)
class Taken:
    """What the service answered to a batch of events: all that neither names was taken.

    Attributes:
        refused: seq -> why nothing of that event was taken.
        refused_in_part: seq -> what of an event was not taken; the rest of it was.

    True where anything was not taken.
    """

    refused: Mapping[int, str]
    refused_in_part: Mapping[int, str]

    def __bool__(self) -> bool:
        return bool(self.refused or self.refused_in_part)

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Taken:
        """Return what `POST /events` answered."""
        refused, in_part = (
            {int(seq): str(text) for seq, text in (answer.get(name) or {}).items()}
            for name in ("refused", "refused_in_part")
        )
        return cls(refused, in_part)


def pack_batch(
    sender: Sequence[Any],
    events: Sequence[Sequence[Any]],
    payloads: Mapping[int, Mapping[str, Any]],
) -> bytes:
    """Return the body of one batch.

    Args:
        sender: what `Sender.wire()` gives.
        events: what `Event.wire()` gives, each.
        payloads: by the sequence number of the END event, as `stagescope.wire.schema` says.
    """
    described: dict[str, Any] = {}
    arrays: dict[str, tuple[str, Array]] = {}
    for seq, payload in payloads.items():
        tensors = {}
        for name, (tag, shape, buffer, offsets) in payload["tensors"].items():
            arrays[f"{seq}/{name}"] = (tag, np.asarray(buffer).reshape(shape))
            if offsets is not None:
                arrays[f"{seq}/{name}/offsets"] = ("int64", np.asarray(offsets, dtype=np.int64))
            tensors[name] = {"dtype": tag, "shape": list(shape), "offsets": offsets is not None}
        described[str(seq)] = {**payload, "tensors": tensors}
    header = spell({"sender": sender, "events": events, "payloads": described})
    text = json.dumps(header, allow_nan=False).encode()
    return b"".join([struct.pack("<Q", len(text)), text, *_safetensors(arrays)])


def _safetensors(arrays: Mapping[str, tuple[str, Array]]) -> list[bytes]:
    if not arrays:
        return []
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    # Widest first: safetensors wants every tensor aligned to its own width, without gaps.
    for name in sorted(arrays, key=lambda name: -arrays[name][1].itemsize):
        tag, array = arrays[name]
        data = array.tobytes()
        header[name] = {
            "dtype": CODES[tag][0],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(data)],
        }
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)), text, *parts]
