"""Reads msprobe's JSON files of any size, entry by entry, through a window over the file.

msprobe writes one object per file, with bare `NaN` and `Infinity`, and overwrites the file while
it collects: after a crash the file may end anywhere. Python's own decoder reads each value (it
accepts those tokens); only the window and the largest single value are in memory, never the file.

Files are not trusted: the size of a value is limited, and invalid JSON or too deep nesting raises
an error. A file that merely ends too early raises `Truncated`.

`DumpFile` reads a dump.json or debug.json:

    {"task": ..., "level": ..., "framework": ..., "dump_data_dir": ..., "data": {NAME: RECORD, ...}}

Usage::

    with open_file(path) as file:
        dump = DumpFile(file, str(path))
        for name, record in dump.records():
            ...
        dump.header, dump.truncated_at

A name is only data: no file is opened by it.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from stagescope_service.store.tensorfile import disk_errors
from stagescope_wire.errors import InvalidInput, NotFound, StagescopeError, TooLarge

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""A JSON value."""

CHUNK_BYTES: Final = 1 << 20
MAX_VALUE: Final = 8 << 20
"""Characters of one value: an optimizer call over thousands of tensors takes about 1 MB."""

_DECODER: Final = json.JSONDecoder()
_SPACE: Final = " \t\n\r"
_SPLIT_REST: Final = 2
_REST: Final = re.compile(r"(?:[.eE][+-]?)?\Z")
_MAX_TOKEN: Final = 16
"""Longest token that the end of a window can split so that Python rejects the rest."""


class Truncated(Exception):
    """The file ends inside a value, or before the object's closing brace."""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or a device is refused without blocking.

    Raises:
        NotFound: there is no such file.
        InvalidInput: it is not a regular file.
        StoreError: the disk reported an error.
    """
    with disk_errors(path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound(f"there is no file {path}") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise InvalidInput(f"{path} is no regular file")
        return os.fdopen(descriptor, "rb", buffering=0)


class JsonWindow:
    """A position in a JSON text that is read from a file on demand."""

    def __init__(
        self,
        file: BinaryIO,
        what: str,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        most_value: int = MAX_VALUE,
    ) -> None:
        self.bytes_read = 0
        self._file = file
        self._what = what
        self._chunk_bytes = chunk_bytes
        self._most_value = most_value
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._at = 0
        self._ended = False

    def next_character(self) -> str:
        """Return the next character that is not white space, without consuming it.

        Raises:
            Truncated: the file has no more characters.
        """
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            self._grow()

    def expect(self, characters: str) -> str:
        """Consume and return the next character, which must be one of `characters`.

        Raises:
            Truncated: the file has no more characters.
            InvalidInput: it is another character.
        """
        found = self.next_character()
        if found not in characters:
            raise self._invalid(f"{found!r} where one of {characters!r} belongs")
        self._at += 1
        return found

    def value(self) -> JsonValue:
        """Consume and return one value.

        Raises:
            Truncated: the file ends inside it.
            TooLarge: it exceeds the size limit of a value.
            InvalidInput: not JSON, or nested too deep.
        """
        self.next_character()
        while True:
            found, end = None, len(self._text)
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
                # The start of a number that the window splits (`12`, `1.`, `1e-`) is a number, too.
                complete = self._ended or end + _SPLIT_REST < len(self._text)
                if self._ended and type(found) in (int, float) and _REST.match(self._text, end):
                    raise Truncated
            except json.JSONDecodeError as error:
                self._check_truncated(error)
                complete = False
            except RecursionError as error:
                raise self._invalid("values are nested too deep") from error
            except ValueError as error:  # an integer of thousands of digits
                raise self._invalid(str(error)) from error
            if end - self._at > self._most_value:
                raise TooLarge(
                    f"{self._what}: a value at byte {self._position()} is over "
                    f"{self._most_value} characters"
                )
            if complete:
                self._at = end
                return found
            self._grow()

    def entries(self) -> Iterator[tuple[str, JsonValue]]:
        """Yield the (name, value) pairs of the object that begins here, in file order.

        Raises:
            Truncated, TooLarge, InvalidInput: see `value`; the pairs yielded before are complete.
        """
        for name in self.names():
            yield name, self.value()

    def names(self) -> Iterator[str]:
        """Yield the names of the object that begins here; the caller consumes each value.

        Raises:
            Truncated, TooLarge, InvalidInput: see `value`.
        """
        self.expect("{")
        if self.next_character() == "}":
            self.expect("}")
            return
        while True:
            if self.next_character() != '"':
                raise self._invalid("a name does not begin with a quotation mark")
            name = str(self.value())
            self.expect(":")
            yield name
            if self.expect(",}") == "}":
                return

    def finish(self) -> None:
        """Check that nothing but white space follows.

        Raises:
            InvalidInput: more follows.
        """
        try:
            found = self.next_character()
        except Truncated:
            return
        raise self._invalid(f"{found!r} after the end")

    def _check_truncated(self, error: json.JSONDecodeError) -> None:
        """Return if the text merely ends too early.

        Raises:
            InvalidInput: the text is invalid whatever follows.
        """
        if error.msg.startswith("Unterminated string"):
            return
        rest = self._text[error.pos : error.pos + _MAX_TOKEN + 1]
        if len(rest) > _MAX_TOKEN or any(character in rest for character in '{}[]",:'):
            raise self._invalid(f"{error.msg} at {rest!r}") from error

    def _grow(self) -> None:
        """Read more, and drop what was consumed; Truncated at the end of the file."""
        if self._ended:
            raise Truncated
        kept = len(self._text) - self._at
        # A value that needs several attempts is retried with twice as much text each time.
        with disk_errors(Path(self._what)):
            data = self._file.read(max(self._chunk_bytes, kept))
        # Blocks that were not on disk before a power cut read as zeros; JSON has none.
        written = data.partition(b"\0")[0]
        self.bytes_read += len(written)
        self._ended = not data or len(written) < len(data)
        try:
            # The first bytes of a character that the file's end split are dropped.
            more = self._decoder.decode(written)
        except UnicodeDecodeError as error:
            raise self._invalid("bytes that are no UTF-8") from error
        self._text = self._text[self._at :] + more
        self._at = 0

    def _position(self) -> int:
        return self.bytes_read - len(self._text[self._at :].encode("utf-8", "surrogatepass"))

    def _invalid(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"{self._what} cannot be read behind byte {self._position()}: {why}",
            expected="JSON as msprobe writes it",
        )


def holds_records(path: Path) -> bool:
    """Return whether a file of msprobe's has a record, or is a file that needs none.

    A damaged file may have records. Task structure records only the modules.
    """
    try:
        with open_file(path) as file:
            dump = DumpFile(file, str(path))
            holds = next(dump.records(), None) is not None or dump.truncated_at is not None
            return holds or dump.header["task"] == STRUCTURE
    except StagescopeError:
        return True


STRUCTURE: Final = "structure"
"""The task that records no call."""
HEADER: Final = ("task", "level", "framework", "dump_data_dir")
MAX_NAME: Final = 4096


class DumpFile:
    """Reads one dump.json or debug.json record by record, in file order."""

    header: dict[str, str | None]
    """The fields besides `data`; fields after it are known after the last record."""
    truncated_at: int | None
    """Byte at which the file is truncated, or None; known after the last record."""
    last_name: str | None
    """Name of the last complete record."""

    def __init__(
        self,
        file: BinaryIO,
        what: str,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        most_record: int = MAX_VALUE,
    ) -> None:
        self.header = dict.fromkeys(HEADER)
        self.truncated_at = None
        self.last_name = None
        self._what = what
        self._window = JsonWindow(file, what, chunk_bytes=chunk_bytes, most_value=most_record)

    @property
    def bytes_read(self) -> int:
        """Bytes read so far."""
        return self._window.bytes_read

    def records(self) -> Iterator[tuple[str, JsonValue]]:
        """Yield (name, record); ends, with `truncated_at` set, where the file is truncated.

        Raises:
            TooLarge: a record or a name exceeds its limit.
            InvalidInput: not JSON, or nested too deep.
        """
        try:
            for key in self._window.names():
                if key == "data" and self._window.next_character() == "{":
                    yield from self._data()
                elif (value := self._window.value()) is not None and key in self.header:
                    self.header[key] = str(value)[:MAX_NAME]
            self._window.finish()
        except Truncated:
            self.truncated_at = self._window.bytes_read

    def _data(self) -> Iterator[tuple[str, JsonValue]]:
        for name, record in self._window.entries():
            if len(name) > MAX_NAME:
                raise TooLarge(f"{self._what}: a name of {len(name)} characters")
            self.last_name = name
            yield name, record
