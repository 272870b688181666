"""The streaming reader: any window, any place where the file ends, anything hostile."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagescope_service.dumps.msprobe.json_window import DumpFile, open_file
from stagescope_wire.errors import InvalidInput, NotFound, TooLarge

leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    leaf, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)
)
records = st.lists(st.tuples(st.text(max_size=40), values), max_size=6)
chunks = st.integers(1, 60)


def text_of(
    entries: Sequence[tuple[str, object]], *, indent: int | None, ascii: bool = True
) -> bytes:
    """As msprobe writes it; a list of entries, since JSON may repeat a name."""
    header = {"task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None}
    items = (f"{json.dumps(name)}: {json.dumps(value, indent=indent)}" for name, value in entries)
    text = json.dumps(header, indent=indent)[:-1] + ', "data": {' + ",\n".join(items) + "}\n}"
    text = text if ascii else json.dumps(json.loads(text), ensure_ascii=False, indent=indent)
    return text.encode("utf-8", "replace")


def read(data: bytes, **limits: int) -> tuple[DumpFile, list[tuple[str, object]]]:
    dump = DumpFile(io.BytesIO(data), "dump.json", **limits)
    return dump, list(dump.records())


def equal(one: object, other: object) -> bool:
    """Equality in which NaN is itself, and -0.0 is not 0."""
    return repr(one) == repr(other)


@given(records, chunks, st.sampled_from([None, 1]))
@example([("a", {"x": -math.inf, "y": math.nan})], 1, None)
def test_any_record_comes_back_through_any_window(
    entries: Sequence[tuple[str, object]], chunk: int, indent: int | None
) -> None:
    data = text_of(entries, indent=indent)
    dump, found = read(data, chunk_bytes=chunk)
    assert equal(found, entries)
    assert dump.truncated_at is None
    assert dump.bytes_read == len(data)
    assert dump.header == {
        "task": "statistics", "level": "L1", "framework": "pytorch", "dump_data_dir": None,
    }  # fmt: skip


@given(records, chunks, st.sampled_from([None, 1]), st.data())
@settings(max_examples=400)
def test_a_file_truncated_anywhere_yields_the_records_before(
    entries: Sequence[tuple[str, object]], chunk: int, indent: int | None, data: st.DataObject
) -> None:
    whole = text_of(entries, indent=indent)
    end = data.draw(st.integers(0, len(whole) - 1))
    dump, found = read(whole[:end], chunk_bytes=chunk)
    assert equal(found, entries[: len(found)])
    assert dump.truncated_at == end
    assert dump.last_name == (entries[len(found) - 1][0] if found else None)
    # Nothing that is whole is left out: a record whose next character is there was yielded.
    shorter, fewer = read(whole[: max(0, end - 1)], chunk_bytes=chunk)
    assert len(fewer) <= len(found)
    assert shorter.truncated_at == max(0, end - 1)


@given(st.text(min_size=1, max_size=20), chunks, st.data())
def test_characters_that_a_window_splits_are_decoded(
    text: str, chunk: int, draw: st.DataObject
) -> None:
    written = text.encode("utf-8", "replace").decode()
    data = text_of([("n", {"value": written})], indent=None, ascii=False)
    assert equal(read(data, chunk_bytes=chunk)[1], [("n", {"value": written})])
    end = draw.draw(st.integers(0, len(data) - 1))
    assert read(data[:end], chunk_bytes=chunk)[0].truncated_at == end


@given(st.binary(max_size=200), chunks)
def test_any_bytes_end_or_raise_a_stagescope_error(data: bytes, chunk: int) -> None:
    for before in (b"", b'{"data": {', b'{"data": {"n": '):
        with contextlib.suppress(InvalidInput):
            dump = read(before + data, chunk_bytes=chunk)[0]
            assert dump.bytes_read <= len(before + data)


@pytest.mark.parametrize("chunk", [7, 1 << 20])
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1]", "'['"),
        ('{"data": {"n": tru}}', "Expecting value"),
        ('{"data": {"n": {"a" 1}}}', "':' delimiter"),
        ('{"data": {"n": {"a": 1 "b": 2}}}', "',' delimiter"),
        ('{"data": {"n": {}} "x": 1}', "where one of ',}'"),
        ('{"data": {n: {}}}', "does not begin with a quotation mark"),
        ('{"data": {}} {"data": {}}', "after the end"),
        ('{"data": {"n": ' + "9" * 5000 + "}}", "4300"),
        ('{"data": {"n": {"a": "\x01"}}}', "Invalid control character"),
        ('{"data": {"\udcff": 1}}', "UTF-8"),
        ('{"data": {"n": ' + "[" * 200_000 + "]" * 200_000 + "}}", "nested too deep"),
    ],
    ids=lambda value: str(value)[:20].encode("ascii", "replace").decode(),
)
def test_invalid_json_is_an_error_with_its_position(chunk: int, text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match="behind byte") as caught:
        read(text.encode(errors="surrogateescape"), chunk_bytes=chunk)
    assert why in str(caught.value)


@pytest.mark.parametrize("chunk", [1 << 10, 1 << 22])
def test_a_record_over_the_limit_is_an_error_whatever_the_window(chunk: int) -> None:
    record = json.dumps({"output": ["x" * 1000]})
    text = f'{{"data": {{"n": {record}}}}}'.encode()
    assert len(read(text, chunk_bytes=chunk, most_record=len(record))[1]) == 1
    with pytest.raises(TooLarge, match="over"):
        read(text, chunk_bytes=chunk, most_record=len(record) - 1)


def test_a_string_that_never_ends_is_not_read_to_the_end_of_the_file() -> None:
    with pytest.raises(TooLarge, match="a name of 5000"):
        read(text_of([("n" * 5000, {})], indent=None))
    dump = DumpFile(io.BytesIO(b'{"data": {"n": "' + b"x" * 1_000_000), "dump.json",
                    chunk_bytes=1000, most_record=10_000)  # fmt: skip
    with pytest.raises(TooLarge):
        list(dump.records())
    assert dump.bytes_read < 50_000


class Endless(io.RawIOBase):
    """A dump.json of any size that exists nowhere."""

    def __init__(self, records: int) -> None:
        self._pieces = (
            f'{"," * bool(i)}"n{i}": {{"output": ["{"x" * 1000}"]}}' for i in range(records)
        )
        self._left = b'{"data": {'

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left and (piece := next(self._pieces, None)) is not None:
            self._left = piece.encode()
        given, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(given)] = given
        return len(given)


def test_memory_does_not_grow_with_the_file() -> None:
    def peak(records: int) -> int:
        tracemalloc.start()
        dump = DumpFile(io.BufferedReader(Endless(records)), "dump.json", chunk_bytes=1 << 16)
        assert sum(1 for _ in dump.records()) == records
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(5000) < 1.2 * peak(500) < 1 << 20


def test_zeros_after_a_power_cut_end_the_file() -> None:
    data = text_of([("a", {"output": []}), ("b", {"output": []})], indent=1)
    for end in range(len(data)):
        dump, found = read(data[:end] + bytes(100))
        assert equal(found, read(data[:end])[1])
        assert dump.truncated_at == end


def test_a_header_behind_the_data_is_read_too() -> None:
    dump, found = read(b'{"data": {"n": {}}, "level": "L0", "data2": [1], "task": null}')
    assert (found, dump.header["level"], dump.header["task"]) == ([("n", {})], "L0", None)
    assert read(b'{"task": "structure", "data": null}')[1] == []


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(InvalidInput, match="no regular file"):
            open_file(path)
    with pytest.raises(NotFound):
        open_file(tmp_path / "nothing")
