"""The file of a bundle: written as tar.gz, and unpacked as if a stranger had sent it.

Only plain files with short names in the oldest tar format are written and accepted. An archive with
anything else (links, devices, other formats' extensions) is refused. So nothing of it can leave its
directory, or take more memory or disk than allowed.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

from stagescope_service.report.bundle.contents import (
    CATALOGUE,
    MANIFEST,
    SCHEMA,
    BundledFile,
    check_name,
)
from stagescope_wire.errors import InvalidInput, TooLarge

MAX_FILES: Final = 100_000
MAX_BYTES: Final = 16 << 30
MAX_MANIFEST_BYTES: Final = 64 << 20
_BLOCK: Final = tarfile.BLOCKSIZE
_CHUNK: Final = 1 << 20
_LEVEL: Final = 1
"""Level of compression: log-probs hardly shrink, and time counts."""

OnProgress = Callable[[int, int], object]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The description of a bundle in its archive."""

    run: str
    attempt: int
    step: int
    version: str
    made_wall: float
    files: tuple[BundledFile, ...]


def write_archive(root: Path, path: Path) -> int:
    """Write a bundle's directory as an archive, its manifest first; return its bytes."""
    names = [each["path"] for each in json.loads((root / MANIFEST).read_bytes())["files"]]
    with path.open("wb") as raw:
        packed = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=_LEVEL, mtime=0)
        with packed, tarfile.open(fileobj=packed, mode="w|", format=tarfile.USTAR_FORMAT) as tar:
            for name in (MANIFEST, *names):
                info = tarfile.TarInfo(f"stagescope-bundle/{name}")
                info.size = (root / name).stat().st_size
                info.mode = 0o644
                with (root / name).open("rb") as file:
                    tar.addfile(info, file)
    return path.stat().st_size


def unpack(
    path: Path, root: Path, *, on_progress: OnProgress = lambda done, total: None
) -> Manifest:
    """Unpack an archive into a new directory.

    Args:
        path: the archive, of anybody.
        root: an empty directory.
        on_progress: called with the bytes that are unpacked, and all.

    Raises:
        InvalidInput: it is no bundle, is damaged, or holds something that no bundle holds.
        TooLarge: it unpacks to more files or bytes than allowed.
    """
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw, mode="rb") as packed:
            return _unpack(packed, root, on_progress)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidInput(
            f"{path} cannot be unpacked: {error}", expected="a file of `stagescope bundle`"
        ) from error


def _unpack(packed: gzip.GzipFile, root: Path, on_progress: OnProgress) -> Manifest:
    members = _members(packed)
    name, size = next(members, ("", 0))
    if name != MANIFEST:
        raise InvalidInput(
            f"its first file is {name!r:.100}",
            expected=f"{MANIFEST}: a file of `stagescope bundle`",
        )
    if size > MAX_MANIFEST_BYTES:
        raise TooLarge(f"a manifest of {size} bytes", expected=f"at most {MAX_MANIFEST_BYTES}")
    text = _read(packed, size)
    manifest = _parse(text)
    (root / MANIFEST).write_bytes(text)
    listed = {file.path: file for file in manifest.files}
    total, done = sum(file.bytes for file in manifest.files), 0
    seen: set[str] = set()
    for name, size in members:
        file = listed.get(name)
        if file is None or name in seen:
            why = "there twice" if name in seen else "not in its manifest"
            raise InvalidInput(f"{name!r:.200} is {why}", expected="a bundle as it was made")
        if size != file.bytes:
            raise InvalidInput(f"{name} has {size} bytes", expected=f"{file.bytes}")
        seen.add(name)
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(target, flags, 0o600), "wb") as to:
            checksum = _copy(packed, size, to)
        if checksum != file.sha256:
            raise InvalidInput(f"{name} is damaged: its checksum is {checksum}")
        done += size
        on_progress(done, total)
    if missing := sorted(set(listed) - seen):
        raise InvalidInput(f"{missing[0]} and {len(missing) - 1} more files are missing")
    return manifest


def _parse(text: bytes) -> Manifest:
    try:
        value = json.loads(text)
        schema = value["schema"]
        files = tuple(
            BundledFile(str(each["path"]), int(each["bytes"]), str(each["sha256"]),
                        str(each["what"]))
            for each in value["files"]
        )  # fmt: skip
        found = Manifest(
            str(value["run"]), int(value["attempt"]), int(value["step"]), str(value["version"]),
            float(value["made_wall"]), files,
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(f"its manifest cannot be read: {error!r:.200}") from error
    if schema != SCHEMA:
        raise InvalidInput(
            f"a bundle of format {schema!r:.20}", expected=f"format {SCHEMA}",
            advice=f"open it with the stagescope that made it: {found.version:.50}",
        )  # fmt: skip
    if len(files) > MAX_FILES:
        raise TooLarge(f"{len(files)} files", expected=f"at most {MAX_FILES}")
    if min((file.bytes for file in files), default=0) < 0:
        raise InvalidInput("a file of less than 0 bytes")
    if (size := sum(file.bytes for file in files)) > MAX_BYTES:
        raise TooLarge(f"it unpacks to {size} bytes", expected=f"at most {MAX_BYTES}")
    for file in files:
        check_name(file.path)
    if CATALOGUE not in {file.path for file in files}:
        raise InvalidInput("it has no catalogue", expected="a file of `stagescope bundle`")
    return found


def _members(packed: gzip.GzipFile) -> Iterator[tuple[str, int]]:
    """Yield name and size of each file; the caller reads its bytes before the next one.

    Raises:
        InvalidInput: something else than a plain file, or no tar.
    """
    for _ in range(MAX_FILES + 2):
        block = packed.read(_BLOCK)
        if len(block) < _BLOCK or not block.strip(b"\0"):
            return
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError) as error:
            raise InvalidInput(f"it is no tar: {error}") from error
        if block[156:157] not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise InvalidInput(
                f"{info.name!r:.200} is no plain file", expected="plain files: nothing is linked"
            )
        folder, _, name = info.name.partition("/")
        if folder != "stagescope-bundle":
            raise InvalidInput(f"a file is called {info.name!r:.200}")
        check_name(name)
        if not 0 <= info.size <= MAX_BYTES:
            raise TooLarge(f"{name} has {info.size} bytes", expected=f"at most {MAX_BYTES}")
        yield name, info.size
        _skip(packed, -info.size % _BLOCK)
    raise TooLarge("too many files", expected=f"at most {MAX_FILES}")


def _skip(packed: gzip.GzipFile, size: int) -> None:
    if len(packed.read(size)) != size:
        raise InvalidInput("it ends too early")


def _read(packed: gzip.GzipFile, size: int) -> bytes:
    buffer = io.BytesIO()
    _copy(packed, size, buffer)
    return buffer.getvalue()


def _copy(packed: gzip.GzipFile, size: int, to: BinaryIO) -> str:
    """Copy `size` bytes; return their SHA-256 in hex."""
    checksum = hashlib.sha256()
    while size > 0:
        piece = packed.read(min(size, _CHUNK))
        if not piece:
            raise InvalidInput("it ends too early")
        checksum.update(piece)
        to.write(piece)
        size -= len(piece)
    return checksum.hexdigest()
