"""Index of a record without its values: enough to find out which rows of two sides pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from stagescope_service.compare.pairing.contents_rows import ContentsRows
from stagescope_service.dumps.records import DumpContents, DumpEntry, Location

BY_SAMPLE_ID: Final = "sample id"
BY_GROUP_AND_RUN: Final = "group_id and run_id"
BY_RESPONSE: Final = "response tokens"
BY_PROMPT: Final = "prompt and place among its trajectories"
BY_ROW: Final = "place and row"
PAIRING_KEYS: Final = (BY_SAMPLE_ID, BY_GROUP_AND_RUN, BY_RESPONSE, BY_PROMPT, BY_ROW)
"""Kinds of keys that pair rows, the most certain first; reports name them."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamedShard:
    """Shape of a shard of a named tensor, and shape of the full tensor and offset in it."""

    shape: tuple[int, ...]
    full_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None


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
    keys: dict[str, tuple[str, ...]] = {}
    if rows.count is not None:
        responses, prompts = rows.content_hashes()
        by_kind = {
            BY_SAMPLE_ID: sample_ids(record),
            BY_GROUP_AND_RUN: group_and_run_ids(record),
            BY_RESPONSE: responses,
            BY_PROMPT: prompts,
        }
        keys = {kind: tuple(each) for kind, each in by_kind.items() if each is not None}
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
    full_shape = _shape(layout.get("global_shape"), len(shape))
    offset = _shape(layout.get("offset"), len(shape))
    if full_shape is None or offset is None:
        return NamedShard(shape)
    inside = all(o + s <= w for o, s, w in zip(offset, shape, full_shape, strict=True))
    return NamedShard(shape, full_shape, offset) if inside else NamedShard(shape)


def row_label(location: Location, row: int) -> str:
    """Return a name for a row without an id."""
    text = str(location._replace(step=None))
    return f"row {row}" if text == "one file" else f"{text}, row {row}"


def sample_ids(record: DumpContents) -> tuple[str, ...] | None:
    """Return the sample id of each row, None if they are unknown."""
    return record.samples


def group_and_run_ids(record: DumpContents) -> tuple[str, ...] | None:
    """Return group_id and run_id of each row, joined; None if they are unknown."""
    groups, runs = record.groups, record.row_texts.get("run_id")
    if groups is None or runs is None:
        return None
    return tuple(f"{group}_{run}" for group, run in zip(groups, runs, strict=True))


def as_mapping(value: object) -> Mapping[str, object]:
    """Return a JSON value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _shape(value: object, dimensions: int) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple) or len(value) != dimensions:
        return None
    return tuple(value) if all(isinstance(each, int) and each >= 0 for each in value) else None
