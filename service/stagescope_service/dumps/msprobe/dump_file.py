"""msprobe's dump.json (and debug.json) record by record, in file order.

    {"task": ..., "level": ..., "framework": ..., "dump_data_dir": ..., "data": {NAME: RECORD, ...}}

Usage::

    with open_file(path) as file:
        dump = DumpFile(file, str(path))
        for name, record in dump.records():
            ...
        dump.header, dump.truncated_at

A name is only data here: nothing is opened by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from stagescope.wire.errors import TooLarge
from stagescope_service.dumps.msprobe.json_window import CHUNK_BYTES, MOST_VALUE, Cut, JsonWindow

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
