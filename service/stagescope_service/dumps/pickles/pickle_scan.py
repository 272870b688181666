"""The sizes, values and names in a file of torch.save, read without loading any of it."""

from __future__ import annotations

import contextlib
import itertools
import pickletools
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stagescope_service.store.tensorfile import MAX_BYTES, disk_errors
from stagescope_wire.errors import InvalidTensor, NotFound

MAX_PICKLE_BYTES: Final = 512 << 20
MAX_MEMBERS: Final = 200_000
_MAX_OPCODES: Final = 2_000_000
_LEGACY_PICKLES: Final = 4
"""Before torch 1.6: a magic number, a version, the machine's properties, and the saved value."""
_VALUES: Final = frozenset(
    {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "GLOBAL", "SHORT_BINUNICODE"}
)


def peek(path: Path, most: int = 64) -> list[str | int]:
    """Return the first texts and integers of the saved value, and the names of its globals.

    Nothing is loaded, so it identifies the format of a file cheaply; [] for any other file.
    """
    found: list[str | int] = []
    # What is no pickle may raise anything. It is of no format; whoever reads it reports the error.
    with contextlib.suppress(Exception):
        for opcode, argument, _ in _opcodes(path):
            if opcode.name in _VALUES and isinstance(argument, str | int):
                found.append(argument)
            if len(found) >= most:
                break
    return found


def size_of_file(path: Path, most_bytes: int) -> int:
    """Return the bytes of a plain file.

    Raises:
        NotFound: there is no such file.
        InvalidTensor: it is a directory, a pipe or a device, or larger than `most_bytes`.
        StoreError: the disk reported an error.
    """
    with disk_errors(path):
        try:
            found = path.stat()
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {path}") from error
    if not stat.S_ISREG(found.st_mode):
        raise InvalidTensor(f"{path} is no file", expected="a file that torch.save wrote")
    if found.st_size > most_bytes:
        raise InvalidTensor(f"{path} has {found.st_size} bytes", expected=f"at most {most_bytes}")
    return found.st_size


def check_zip(path: Path, size: int) -> bool:
    """Return whether it is a zip file; check the sizes that it declares against its own.

    Raises:
        InvalidTensor: truncated, compressed, or declaring more bytes than it has.
        StoreError: the disk reported an error.
    """
    with disk_errors(path), path.open("rb") as file:
        begins = file.read(4)
        if begins != b"PK\x03\x04":
            return False
        try:
            members = zipfile.ZipFile(file).infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            raise InvalidTensor(
                f"{path} ({size} bytes) is no whole zip file: {error}",
                expected="a file that torch.save wrote",
                advice="it was cut off, or is still being written. Look at its disk and copy it "
                "again",
            ) from error
    pickles = [each.file_size for each in members if each.filename.endswith("data.pkl")]
    if any(each.compress_type != zipfile.ZIP_STORED for each in members):
        raise InvalidTensor(
            f"{path} holds compressed members", expected="stored ones, as torch.save writes them"
        )
    if sum(each.file_size for each in members) > size:
        raise InvalidTensor(
            f"{path} has {size} bytes and claims "
            f"{sum(each.file_size for each in members)} bytes of members",
            expected="no more than it has",
        )
    if len(members) > MAX_MEMBERS or max(pickles, default=0) > MAX_PICKLE_BYTES:
        raise InvalidTensor(
            f"{path} holds {len(members)} members and a pickle of {max(pickles, default=0)} bytes",
            expected=f"at most {MAX_MEMBERS} and {MAX_PICKLE_BYTES}",
        )
    return True


def globals_of(path: Path) -> list[str]:
    """Return the globals of a file's pickle (`module.name`), and a protocol torch does not load.

    A damaged or very long pickle gives only those in its beginning.
    """
    found: dict[str, None] = {}
    texts: list[str] = []
    # A damaged pickle may raise anything. Its reading reports that; names before it are known.
    with contextlib.suppress(Exception):
        for opcode, argument, _ in itertools.islice(_opcodes(path), _MAX_OPCODES):
            if opcode.name in ("GLOBAL", "INST"):
                found[str(argument).replace(" ", ".")] = None
            elif opcode.name == "STACK_GLOBAL":
                found[".".join(texts[-2:])] = None
            elif opcode.name == "PROTO" and argument is not None and int(str(argument)) > 2:
                found[f"pickle protocol {argument}"] = None
            elif isinstance(argument, str):
                texts = [*texts[-1:], argument]
    return [*found]


def _opcodes(path: Path) -> Iterator[tuple[pickletools.OpcodeInfo, object, int | None]]:
    if check_zip(path, size_of_file(path, MAX_BYTES)):
        with zipfile.ZipFile(path) as members:
            name = next(each for each in members.namelist() if each.endswith("data.pkl"))
            with members.open(name) as pickled:
                yield from pickletools.genops(pickled)
        return
    with path.open("rb") as file:
        for _ in range(_LEGACY_PICKLES):
            yield from pickletools.genops(file)
