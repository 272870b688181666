"""Detecting the format of a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stagescope_service.dumps.formats import (
    areal,
    msprobe_directory,
    nemo_rl,
    nexrl,
    own,
    prime_rl,
    prime_rl_traces,
    saved_batch,
    slime,
    verl_jsonl,
)
from stagescope_service.dumps.formats.content import damage_of
from stagescope_service.dumps.formats.listing import FileFormat, Format, files_of, rank_dumps
from stagescope_service.dumps.records import Dump, Location
from stagescope_wire.errors import InvalidInput, NotFound

_NAMED: Final[tuple[Format | FileFormat, ...]] = (own.FORMAT, nexrl.FORMAT)
"""Detected by file names alone; files are opened only if neither of these is found."""
_OPENED: Final[tuple[Format | FileFormat, ...]] = (
    saved_batch.FORMAT, slime.FORMAT, areal.FORMAT, nemo_rl.FORMAT, prime_rl.FORMAT,
    prime_rl_traces.FORMAT, verl_jsonl.FORMAT, msprobe_directory.FORMAT,
)  # fmt: skip
_FORMATS: Final = {each.kind: each for each in (*_NAMED, *_OPENED)}


def open_dump(path: Path, *, step: int | None = None, kind: str | None = None) -> Dump:
    """Open a directory or file of dumps of any known format; no tensor is read.

    Args:
        path: a directory, or one file.
        step: only this step.
        kind: the name of the format; None detects it.

    Raises:
        NotFound: there is no such path, or it has no known format or no such step.
        InvalidInput: an unknown kind, files of several formats, or several dumps of one.
        InvalidTensor: `path` is one damaged file, so that its format cannot be detected.
        TooLarge: more than `listing.MAX_FILES` files.
        StoreError: the disk reported an error.
    """
    if not path.exists():
        raise NotFound(f"there is no directory or file {path}")
    if kind is not None and kind not in _FORMATS:
        raise InvalidInput(f"kind {kind!r} is not known", expected=f"one of {', '.join(_FORMATS)}")
    found = _FORMATS[kind] if kind is not None else _detect(path)
    dump = found.open(path, step)
    if step is not None and not _locations(dump):
        there = {each.step for each in _locations(found.open(path, None)) if each.step is not None}
        steps = ", ".join(map(str, sorted(there)[:20])) or "it says none"
        raise NotFound(
            f"{path} holds nothing of step {step}", expected=f"one of its steps: {steps}"
        )
    return dump


def _locations(dump: Dump) -> list[Location]:
    ranks = rank_dumps(dump)
    return [*(each.location for each in dump.entries), *(each.location for each in ranks)]


def _detect(path: Path) -> Format | FileFormat:
    found, _ = files_of(path.absolute())
    formats = [each for each in _NAMED if each.holds(found)]
    formats = formats or [each for each in _OPENED if each.holds(found)]
    if len(formats) > 1:
        raise InvalidInput(
            f"{path} holds dumps of several formats: {', '.join(each.kind for each in formats)}",
            expected="one",
            advice="name it (kind), or give the directory of one",
        )
    if not formats:
        if path.is_file() and (error := damage_of(path)) is not None:
            raise error
        raise NotFound(
            f"{path} holds no dump of a known format ({len(found)} files)",
            expected="; ".join(each.layout for each in _FORMATS.values()),
        )
    return formats[0]
