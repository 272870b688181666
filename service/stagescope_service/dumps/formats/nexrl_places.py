"""Which part of which stage each file of an export in NexRL's layout was.

NexRL's names know a rank and a microbatch. A step with several stages, epochs or mini-batches is
numbered on; `stagescope.json` beside the directories says what each number stands for, so that an
export compares with what it was made of. NexRL's scripts do not look at it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stagescope.wire.errors import InvalidTensor
from stagescope.wire.schema import Part
from stagescope_service.dumps.records import Place
from stagescope_service.store.tensorfile import disk_errors

NAME: Final = "stagescope.json"
_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20


def write_places(directory: Path, places: Mapping[str, Place]) -> None:
    """Write what each file is, by its name below the directory, whole or not at all.

    Raises:
        StoreError: the disk refused.
    """
    files = {
        name: {"step": place.step, "stage": place.stage, "role": place.role, "rank": place.rank,
               "part": [*_numbers(place.part)]}
        for name, place in sorted(places.items())
    }  # fmt: skip
    path = directory / NAME
    with disk_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{NAME}")
        temporary.write_text(json.dumps({"version": _VERSION, "files": files}), encoding="utf-8")
        os.replace(temporary, path)


def read_places(directory: Path) -> dict[str, Place]:
    """Return what `write_places` wrote; nothing where the directory is no export.

    Raises:
        InvalidTensor: the file is damaged, or of a version that is not known.
        StoreError: the disk refused.
    """
    path = directory / NAME
    with disk_errors(path):
        if not path.is_file():
            return {}
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidTensor(f"{path} is too large", expected=f"at most {_MOST_BYTES} bytes")
        text = path.read_bytes()
    try:
        said = json.loads(text)
        if said["version"] != _VERSION:
            raise InvalidTensor(f"{path} has version {said['version']!r}", expected=str(_VERSION))
        return {str(name): _place(about) for name, about in said["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidTensor(f"{path} cannot be read: {error!r:.200}") from error


def _place(said: Mapping[str, Any]) -> Place:
    numbers = [said["step"], said["rank"], *said["part"]]
    texts = [said["stage"], said["role"]]
    if len(said["part"]) != 4 or not all(type(each) is int for each in said["part"]):
        raise ValueError(f"part {said['part']!r}")
    if not all(each is None or type(each) is int for each in numbers):
        raise ValueError(f"numbers {numbers!r}")
    if not all(each is None or isinstance(each, str) for each in texts):
        raise ValueError(f"names {texts!r}")
    stage, role = texts
    return Place(said["step"], stage, role, said["rank"], Part(*said["part"]))


def _numbers(part: Part) -> tuple[int, int, int, int]:
    return part.occurrence, part.epoch, part.minibatch, part.microbatch
