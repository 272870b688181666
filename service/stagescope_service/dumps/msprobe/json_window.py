"""JSON objects of any size, entry by entry, through a window over the file.

msprobe writes one object per file, with bare `NaN` and `Infinity`, and rewrites it in place while
it collects: after a crash the file ends anywhere. Python's own decoder reads each value (it knows
those tokens); only the window and the largest single value are in memory, never the file.

Nothing of a file is trusted: a value has a largest size, too much nesting and what is no JSON are
errors of this project. A file that merely ends too early is no error but `Cut`.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from stagescope.wire.errors import InvalidInput, NotFound, TooLarge
from stagescope_service.store.tensorfile import disk_errors

CHUNK_BYTES: Final = 1 << 20
MOST_VALUE: Final = 8 << 20
"""Characters of one value: an optimizer call over thousands of tensors takes about 1 MB."""

_DECODER: Final = json.JSONDecoder()
_SPACE: Final = " \t\n\r"
_SPLIT_REST: Final = 2
_REST: Final = re.compile(r"(?:[.eE][+-]?)?\Z")
_LONGEST_TOKEN: Final = 16
"""Characters that the end of a window can split off so that Python calls the rest no JSON."""


class Cut(Exception):
    """The file ends inside a value, or before the object's closing brace."""


def open_file(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or device in its place is refused, never waited for.

    Raises:
        NotFound: there is no such file.
        InvalidInput: it is no regular file.
        StoreError: the disk refused.
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
    """A position in a JSON text that is read from a file as it is needed."""

    def __init__(
        self,
        file: BinaryIO,
        what: str,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        most_value: int = MOST_VALUE,
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
        """Return the next character that is no white space, without going past it.

        Raises:
            Cut: the file has no more.
        """
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            self._grow()

    def expect(self, characters: str) -> str:
        """Go past the next character, which is one of `characters`, and return it.

        Raises:
            Cut: the file has no more.
            InvalidInput: it is another one.
        """
        found = self.next_character()
        if found not in characters:
            raise self._invalid(f"{found!r} where one of {characters!r} belongs")
        self._at += 1
        return found

    def value(self) -> Any:
        """Go past one value and return it.

        Raises:
            Cut: the file ends inside it.
            TooLarge: it is larger than a value may be.
            InvalidInput: no JSON, or nested too deep.
        """
        self.next_character()
        while True:
            found, end = None, len(self._text)
            try:
                found, end = _DECODER.raw_decode(self._text, self._at)
                # A number that the window's end splits (`12`, `1.`, `1e-`) is one without its rest.
                complete = self._ended or end + _SPLIT_REST < len(self._text)
                if self._ended and type(found) in (int, float) and _REST.match(self._text, end):
                    raise Cut
            except json.JSONDecodeError as error:
                self._check_cut(error)
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

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Yield the (name, value) pairs of the object that begins here, in file order.

        Raises:
            Cut, TooLarge, InvalidInput: see `value`; what was yielded before is whole.
        """
        for name in self.names():
            yield name, self.value()

    def names(self) -> Iterator[str]:
        """Yield the names of the object that begins here; the caller goes past each value.

        Raises:
            Cut, TooLarge, InvalidInput: see `value`.
        """
        self.expect("{")
        if self.next_character() == "}":
            self.expect("}")
            return
        while True:
            if self.next_character() != '"':
                raise self._invalid("a name does not begin with a quotation mark")
            name: str = self.value()
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
        except Cut:
            return
        raise self._invalid(f"{found!r} after the end")

    def _check_cut(self, error: json.JSONDecodeError) -> None:
        """Return where the text merely ends too early.

        Raises:
            InvalidInput: the text is wrong however it goes on.
        """
        if error.msg.startswith("Unterminated string"):
            return
        rest = self._text[error.pos : error.pos + _LONGEST_TOKEN + 1]
        if len(rest) > _LONGEST_TOKEN or any(character in rest for character in '{}[]",:'):
            raise self._invalid(f"{error.msg} at {rest!r}") from error

    def _grow(self) -> None:
        """Read on, and drop what was gone past; Cut at the end of the file."""
        if self._ended:
            raise Cut
        kept = len(self._text) - self._at
        # A value that needs several tries is tried over twice as much each time.
        with disk_errors(Path(self._what)):
            data = self._file.read(max(self._chunk_bytes, kept))
        # Blocks that never reached the disk before a power cut read as zeros; JSON has none.
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


HEADER: Final = ("task", "level", "framework", "dump_data_dir")
MOST_NAME: Final = 4096


class DumpFile:
    """One dump.json on its way through the window."""

    header: dict[str, str | None]
    """What stands beside `data`; what comes behind it is known after the last record."""
    truncated_at: int | None
    """Byte at which the file was cut off, or None; known after the last record."""
    last_name: str | None
    """Name of the last whole record."""

    def __init__(
        self,
        file: BinaryIO,
        what: str,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        most_record: int = MOST_VALUE,
    ) -> None:
        self.header = dict.fromkeys(HEADER)
        self.truncated_at = None
        self.last_name = None
        self._what = what
        self._window = JsonWindow(file, what, chunk_bytes=chunk_bytes, most_value=most_record)

    @property
    def bytes_read(self) -> int:
        """Bytes read up to now."""
        return self._window.bytes_read

    def records(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, record); ends, with `truncated_at` set, where the file was cut off.

        Raises:
            TooLarge: a record or a name over its limit.
            InvalidInput: no JSON, or nested too deep.
        """
        try:
            for key in self._window.names():
                if key == "data" and self._window.next_character() == "{":
                    yield from self._data()
                else:
                    self._keep(key, self._window.value())
            self._window.finish()
        except Cut:
            self.truncated_at = self._window.bytes_read

    def _data(self) -> Iterator[tuple[str, Any]]:
        for name, record in self._window.entries():
            if len(name) > MOST_NAME:
                raise TooLarge(f"{self._what}: a name of {len(name)} characters")
            self.last_name = name
            yield name, record

    def _keep(self, key: str, value: Any) -> None:
        if key in self.header and value is not None:
            self.header[key] = str(value)[:MOST_NAME]
