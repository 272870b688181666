"""Index of a record without its values: enough to find out which rows of two sides pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, NamedTuple

from stagescope_service.compare.pairing.contents_rows import ContentsRows
from stagescope_service.dumps.records import DumpContents, DumpEntry, Location

BY_SAMPLE_ID: Final = "sample id"
BY_GROUP_AND_RUN: Final = "group_id and run_id"
BY_RESPONSE: Final = "response tokens"
BY_PROMPT: Final = "prompt and place among its trajectories"
BY_ROW: Final = "place and row"
PAIRING_KEYS: Final = (BY_SAMPLE_ID, BY_GROUP_AND_RUN, BY_RESPONSE, BY_PROMPT, BY_ROW)
"""Kinds of keys that pair rows, the most certain first; reports name them."""


class NamedShard(NamedTuple):
    """Box of a named tensor that a shard holds: its shape, its offset, and the full shape."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ShardIndex:
    """Contents of a record, without its values.

    Attributes:
        entry: entry of the record.
        rows: number of rows.
        keys: kind of key (`PAIRING_KEYS`) -> key of each row; unknown kinds are absent.
        row_hashes: a hash of each row over all values that count: equal rows are replicas.
        token_counts: number of tokens of each row that count.
        has_fragments: rows may be fragments of samples, with positions.
        row_tensors, numbers: names of the tensors by row and of the numbers.
        named: tensors without rows.
    """

    entry: DumpEntry
    rows: int = 0
    keys: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    row_hashes: tuple[str, ...] = ()
    token_counts: tuple[int, ...] = ()
    has_fragments: bool = False
    row_tensors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    named: Mapping[str, NamedShard] = dataclasses.field(default_factory=dict)


def describe(rows: ContentsRows) -> ShardIndex:
    """Return the index of a record."""
    record = rows.record
    keys = {kind: tuple(ids) for kind, ids in ids_of(record).items()}
    if rows.count is not None:
        by_content = zip((BY_RESPONSE, BY_PROMPT), rows.content_hashes(), strict=True)
        keys |= {kind: tuple(hashes) for kind, hashes in by_content if hashes is not None}
    return ShardIndex(
        record.entry, rows.count or 0, keys,
        row_hashes=tuple(rows.row_hashes()) if rows.count and rows.names else (),
        token_counts=tuple(rows.token_counts().tolist()),
        has_fragments=rows.has_fragments,
        row_tensors=rows.names, numbers=tuple(record.numbers),
        named={
            name: named_shard(record, name) for name in record.tensors if name not in rows.names
        },
    )  # fmt: skip


def named_shard(record: DumpContents, name: str) -> NamedShard:
    """Read the offset of a shard from `about["shards"][name]`: {global_shape, offset}."""
    layout = as_mapping(as_mapping(record.about.get("shards")).get(name))
    shape = tuple(record.tensors[name][1])
    full_shape, offset = (_shape(layout.get(key), len(shape)) for key in ("global_shape", "offset"))
    box = zip(offset or (), shape, full_shape or (), strict=False)
    if full_shape and offset and all(start + size <= end for start, size, end in box):
        return NamedShard(shape, offset, full_shape)
    return NamedShard(shape, (0,) * len(shape), shape)


def row_label(location: Location, row: int) -> str:
    """Return a name for a row without an id."""
    text = str(location._replace(step=None))
    return f"row {row}" if text == "one file" else f"{text}, row {row}"


def ids_of(record: DumpContents) -> dict[str, tuple[str, ...]]:
    """Return kind of key -> id of each row, for the ids that the record has."""
    found = {} if record.samples is None else {BY_SAMPLE_ID: record.samples}
    runs = record.row_texts.get("run_id")
    if record.groups is not None and runs is not None:
        pairs = zip(record.groups, runs, strict=True)
        found[BY_GROUP_AND_RUN] = tuple(f"{group}_{run}" for group, run in pairs)
    return found


def as_mapping(value: object) -> Mapping[str, object]:
    """Return a JSON value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _shape(value: object, dimensions: int) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple) or len(value) != dimensions:
        return None
    return tuple(value) if all(isinstance(each, int) and each >= 0 for each in value) else None
