"""Files of kept payloads: safetensors, with everything else that was recorded as metadata.

One file holds one payload of one part of a stage of a step of a rank. The metadata make it
self-contained::

    sections   section -> names of the tensors (for `loss` and `metrics`: of the numbers)
    scalars    name -> the number that the stage logged
    strings    name -> one text per row: sample_ids, group_ids, answers, ...
    meta       further recorded values: sampling parameters, streams, shards, datums
    job        run, attempt_key, role, rank, layout, settings, step, stage, part; and the payload's
               delivery identity: incarnation, seq
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from stagescope_service.store.artifacts import make_directory
from stagescope_service.store.tensorfile import (
    WireTensor,
    Written,
    disk_errors,
    read_tensors,
    size_of,
    write_tensors,
)
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.nonfinite import Json, JsonObject, number


class Kept(NamedTuple):
    """The content of a kept file."""

    tensors: dict[str, WireTensor]
    sections: dict[str, list[str]]
    scalars: dict[str, float]
    strings: dict[str, list[str]]
    meta: dict[str, Json]
    job: dict[str, Json]

    def about(self) -> dict[str, Json]:
        """Return the metadata of the file."""
        return {name: getattr(self, name) for name in _FIELDS}


_FIELDS: Final = ("sections", "scalars", "strings", "meta", "job")


def write_kept(path: Path, kept: Kept) -> Written:
    """Write a kept file atomically, like `write_tensors`; creates its directory.

    Raises:
        InvalidTensor: a dtype, shape or name that cannot be written, or too many texts.
        StoreError: the file cannot be written.
    """
    with disk_errors(path):
        make_directory(path.parent)
    return write_tensors(path, kept.tensors, kept.about())


def bytes_of(kept: Kept) -> int:
    """Return the size of the file in bytes."""
    return size_of(kept.tensors, kept.about())


def read_kept(path: Path) -> Kept:
    """Read a kept file; its content is untrusted.

    Raises:
        NotFound: there is no such file.
        InvalidTensor: it is damaged, or not a kept file.
        StoreError: the file cannot be read.
    """
    file = read_tensors(path)
    return from_metadata(file.tensors, file.metadata, path)


def from_metadata(tensors: Mapping[str, WireTensor], metadata: JsonObject, path: Path) -> Kept:
    """Build the content of a kept file from its tensors and metadata.

    Raises:
        InvalidTensor: the metadata belong to another kind of file.
    """
    try:
        fields = {name: dict(metadata[name]) for name in _FIELDS}
        fields["scalars"] = {str(n): float(number(value)) for n, value in fields["scalars"].items()}
        for name in ("sections", "strings"):
            fields[name] = {str(n): [*map(str, texts)] for n, texts in fields[name].items()}
        return Kept(dict(tensors), **fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidTensor(f"{path} is not a kept file of a stage: {error!r}") from error
