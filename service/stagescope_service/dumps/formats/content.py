"""The content of one .pt, .jsonl or converted .json file as plain values.

Tensors are `FileTensor`; everything else is dicts, lists, numbers, texts and None. A converted
file is a JSON tree beside a safetensors file that holds its tensors and its long lists of numbers.
Their names differ only in the suffix, so the JSON never names a path.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np

from stagescope_service.dumps.pickles.pickle_scan import peek
from stagescope_service.dumps.pickles.torch_file import (
    FileTensor,
    FileValue,
    Unreadable,
    read_torch_file,
)
from stagescope_service.store.tensorfile import (
    WireTensor,
    describe_file,
    disk_errors,
    read_tensors,
    write_tensors,
)
from stagescope_wire.errors import Forbidden, InvalidTensor, NotFound, StagescopeError
from stagescope_wire.tensorfile import Array

SUFFIXES: Final = (".pt", ".jsonl", ".json")
MAX_TEXT_BYTES: Final = 1 << 30
MAX_LINE_BYTES: Final = 64 << 20
_MAX_VALUES: Final = 64
_MAX_PEEKED: Final = 4
_MAX_LINES: Final = 100
"""Lines of a .jsonl file in which its first object is looked for."""
_CONVERTED: Final = "stagescope_converted"
_HEAD: Final = f'{{"{_CONVERTED}'.encode()
"""The first bytes of a converted file."""
_DEPTH: Final = 64
_LISTS: Final = {int: "ints", float: "floats"}
_T = TypeVar("_T")
_SHORT: Final = 8
"""Shorter lists of numbers stay in the tree."""


def read_content(path: Path) -> FileValue:
    """Read a file by its suffix.

    Returns:
        The saved value, or the list of the lines of a .jsonl file.

    Raises:
        NotFound: there is no such file.
        InvalidTensor: damaged, too large, or of another suffix.
        Forbidden: see `read_torch_file`.
        StoreError: the disk reported an error.
    """
    if path.suffix == ".pt":
        return read_torch_file(path)
    if path.suffix == ".jsonl":
        return [_parse_named(line, path) for line in json_lines(path)]
    tree = _read_tree(path)
    if path.suffix != ".json" or not isinstance(tree, dict) or tree.get(_CONVERTED) != 1:
        raise InvalidTensor(
            f"{path} is no file of a dump",
            expected=f"a file of {', '.join(SUFFIXES)}; .json as stagescope convert writes it",
        )
    return _Decoder(path, read_tensors(path.with_suffix(".safetensors")).tensors)(tree["content"])


class JsonLine(NamedTuple):
    """A line of a JSON Lines file: its number from 1, its bytes, and whether a newline ends it."""

    number: int
    data: bytes
    is_ended: bool


def json_lines(path: Path) -> Iterator[JsonLine]:
    r"""Yield the lines of a JSON Lines file that are not blank.

    Only `\n` separates them. A JSON text may hold the other characters that Python splits lines at,
    such as U+2028 and U+0085.

    Raises:
        NotFound: there is no such file.
        InvalidTensor: too large.
        StoreError: the disk reported an error.
    """
    lines = _bytes(path).split(b"\n")
    for number, data in enumerate(lines, 1):
        if data.strip():
            yield JsonLine(number, data, number < len(lines))


def parse_line(line: JsonLine) -> FileValue:
    """Read one line.

    Raises:
        InvalidTensor: it is no JSON, no UTF-8, or nested too deeply; the message follows the
            line's name.
    """
    try:
        found: FileValue = json.loads(
            line.data.decode("utf-8-sig" if line.number == 1 else "utf-8")
        )
    except RecursionError as error:
        raise InvalidTensor("holds JSON that is nested too deeply") from error
    except ValueError as error:
        why = "it is damaged" if line.is_ended else "it was cut off while it was written"
        raise InvalidTensor(f"is no JSON ({error}): {why}") from error
    return found


def _read_tree(path: Path) -> FileValue:
    return _parse_named(JsonLine(1, _bytes(path), is_ended=False), path)


def _parse_named(line: JsonLine, path: Path) -> FileValue:
    try:
        return parse_line(line)
    except InvalidTensor as error:
        raise InvalidTensor(f"line {line.number} of {path} {error.wrong}") from error


@functools.lru_cache(maxsize=1)
def _read_cached(path: Path, _modified: int, _bytes: int) -> FileValue:
    return read_content(path)


def read_shared(path: Path) -> FileValue:
    """Read a file of several entries; the last one read is cached until it changes.

    Raises:
        NotFound, InvalidTensor, Forbidden, StoreError: as `read_content`.
    """
    try:
        found = path.stat()
    except OSError:
        return read_content(path)  # raises the right error
    return _read_cached(path, found.st_mtime_ns, found.st_size)


def first_values(path: Path, most: int = _MAX_VALUES) -> list[str | int]:
    """Return the first texts and integers in a file, cheaply; see `pickle_scan.peek`.

    From a .jsonl file it reads the first line that is an object; damaged lines before it are
    skipped. Return [] for an unreadable or foreign file.
    """
    if path.suffix == ".pt":
        return peek(path, most)
    try:
        if path.suffix == ".jsonl":
            return _first(_first_object(path), most)
        with path.open("rb") as file:
            is_converted = file.read(len(_HEAD)) == _HEAD
        tree = _read_tree(path) if is_converted else None
        return _first(tree["content"], most) if isinstance(tree, dict) else []
    except (OSError, ValueError, RecursionError, TypeError, KeyError, StagescopeError):
        return []


def _first_object(path: Path) -> FileValue:
    with path.open("rb") as file:
        for data in itertools.islice(iter(lambda: file.readline(MAX_LINE_BYTES), b""), _MAX_LINES):
            try:
                found: FileValue = json.loads(data)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                return found
    return None


def damage_of(path: Path) -> StagescopeError | None:
    """Return why a file without an identified format cannot be read.

    None if it is intact, or not of a kind that this project reads. A truncated file may belong to
    a dump, so it is never ignored as a foreign file.
    """
    try:
        if path.suffix == ".json":
            with disk_errors(path), path.open("rb") as file:
                head = file.read(len(_HEAD))
            if not _HEAD.startswith(head):
                return None
        elif path.suffix == ".safetensors":
            describe_file(path)
            return None
        elif path.suffix not in SUFFIXES or len(first_values(path)) >= _MAX_VALUES:
            return None
        if read_content(path) == [] and path.suffix == ".jsonl":
            return InvalidTensor(f"{path} holds no line", expected="a line a trajectory")
    except Forbidden:
        return None  # intact, and not of the format
    except StagescopeError as error:
        return error
    return None


def _first(value: FileValue, most: int, depth: int = 0) -> list[str | int]:
    if isinstance(value, str | int):
        return [value]
    found: list[str | int] = []
    if isinstance(value, list) and value and depth < _MAX_PEEKED:
        found = _first(value[0], most, depth + 1)
    elif isinstance(value, dict) and depth < _MAX_PEEKED:
        for name, item in value.items():
            found += [name, *_first(item, most, depth + 1)]
            if len(found) >= most:
                break
    return found


def write_content(path: Path, content: FileValue) -> None:
    """Write `content` as `{path}` (.json) and the safetensors file beside it.

    Raises:
        InvalidTensor: a value that has no plain form.
        StoreError: the disk reported an error.
    """
    encode = _Encoder()
    tree = encode(content)
    write_tensors(path.with_suffix(".safetensors"), encode.tensors())
    text = json.dumps({_CONVERTED: 1, "content": tree}, allow_nan=False, separators=(",", ":"))
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_errors(path):
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)


def _bytes(path: Path) -> bytes:
    with disk_errors(path):
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_TEXT_BYTES:
                    raise InvalidTensor(
                        f"{path} has {size} bytes", expected=f"at most {MAX_TEXT_BYTES} of JSON"
                    )
                return file.read()
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {path}") from error
        except IsADirectoryError as error:
            raise InvalidTensor(f"{path} is a directory", expected="a file") from error


class _Encoder:
    """Converts values to a JSON tree; tensors and long lists become references into one file."""

    def __init__(self) -> None:
        self._tensors: dict[str, WireTensor] = {}
        self._rows: dict[str, list[Array]] = {"ints": [], "floats": []}

    def __call__(self, value: FileValue) -> object:
        if isinstance(value, FileTensor):
            name = str(len(self._tensors))
            self._tensors[name] = value.wire
            return {"$tensor": name, **({"was": value.was} if value.was else {})}
        if isinstance(value, Unreadable):
            return {"$unreadable": value.reason}
        if isinstance(value, dict):
            items = {name: self(item) for name, item in value.items()}
            return {"$dict": items} if any(name.startswith("$") for name in items) else items
        if isinstance(value, list):
            return self._list(value)
        if isinstance(value, float) and not math.isfinite(value):
            return {"$float": str(value)}
        if isinstance(value, bytes):
            return {"$unreadable": f"{len(value)} bytes"}
        return value

    def _list(self, values: list[FileValue]) -> object:
        kinds = set(map(type, values))
        name = _LISTS.get(next(iter(kinds))) if len(kinds) == 1 else None
        if name is None or len(values) < _SHORT:
            return [self(item) for item in values]
        try:
            row: Array = np.array(values, np.int64 if name == "ints" else np.float64)
        except OverflowError:
            return values
        self._rows[name].append(row)
        return {f"${name}": len(self._rows[name]) - 1}

    def tensors(self) -> dict[str, WireTensor]:
        """Return the tensors that the tree refers to."""
        found = dict(self._tensors)
        for name, rows in self._rows.items():
            if rows:
                flat = np.concatenate(rows)
                offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
                found[name] = (str(flat.dtype), flat.shape, flat, offsets)
        return found


class _Decoder:
    """Reads back the tree of `_Encoder`; long lists stay arrays."""

    def __init__(self, path: Path, tensors: dict[str, WireTensor]) -> None:
        self._path = path
        self._tensors = tensors

    def __call__(self, value: FileValue, depth: int = 0) -> FileValue:
        if depth > _DEPTH:
            raise InvalidTensor(f"{self._path} is nested deeper than {_DEPTH}")
        if isinstance(value, list):
            return [self(item, depth + 1) for item in value]
        if not isinstance(value, dict):
            return value
        try:
            return self._reference(value, depth)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InvalidTensor(
                f"{self._path} refers to {value!r:.100}, which is not beside it"
            ) from error

    def _reference(self, value: dict[str, FileValue], depth: int) -> FileValue:
        match value:
            case {"$tensor": name}:
                was = value.get("was")
                return FileTensor(
                    self._tensors[_checked(name, str)], None if was is None else str(was)
                )
            case {"$unreadable": reason}:
                return Unreadable(str(reason))
            case {"$float": text}:
                return float(str(text))
            case {"$ints": index} | {"$floats": index}:
                number = _checked(index, int)
                tag, _, values, offsets = self._tensors["ints" if "$ints" in value else "floats"]
                row = values[offsets[number] : offsets[number + 1]] if offsets is not None else None
                if row is None or number < 0:
                    raise IndexError(number)
                return FileTensor((tag, row.shape, row, None))
            case {"$dict": items}:
                value = _checked(items, dict)
        return {name: self(item, depth + 1) for name, item in value.items()}


def _checked(value: FileValue, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError(value)
    return value
