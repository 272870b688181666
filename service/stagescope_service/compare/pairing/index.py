"""What a record holds, without its values: enough to find out which rows of two sides pair."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from stagescope_service.compare.pairing.rows import Rows
from stagescope_service.dumps.records import Entry, Place, Record

SAMPLE: Final = "sample id"
RUN: Final = "group_id and run_id"
RESPONSE: Final = "response tokens"
PROMPT: Final = "prompt and place among its trajectories"
ROW: Final = "place and row"
KEYS: Final = (SAMPLE, RUN, RESPONSE, PROMPT, ROW)
"""By what rows are paired, the surest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamedShard:
    """A shard of a named tensor: its shape, that of the whole, and where it lies in it."""

    shape: tuple[int, ...]
    whole: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ShardIndex:
    """What a record holds, without its values.

    Attributes:
        entry: which.
        rows: how many.
        keys: of each row by kind (KEYS); a kind that is unknown is absent.
        digests: of all that counts of each row: equal rows are replicas.
        counted: tokens of each row that count.
        fragments: whether its rows may be fragments of samples, with positions.
        row_tensors, numbers: names.
        named: tensors that have no rows.
    """

    entry: Entry
    rows: int = 0
    keys: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    digests: tuple[str, ...] = ()
    counted: tuple[int, ...] = ()
    fragments: bool = False
    row_tensors: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    named: Mapping[str, NamedShard] = dataclasses.field(default_factory=dict)


def describe(rows: Rows) -> ShardIndex:
    """Return what a record holds."""
    record = rows.record
    keys: dict[str, tuple[str, ...]] = {}
    if rows.count is not None:
        responses, prompts = rows.content()
        found = {
            SAMPLE: samples_of(record), RUN: runs_of(record), RESPONSE: responses, PROMPT: prompts,
        }  # fmt: skip
        keys = {kind: tuple(each) for kind, each in found.items() if each is not None}
    return ShardIndex(
        record.entry, rows.count or 0, keys,
        digests=tuple(rows.digests()) if rows.count and rows.names else (),
        counted=tuple(rows.counted().tolist()),
        fragments=rows.has_fragments,
        row_tensors=rows.names, numbers=tuple(record.numbers),
        named={
            name: named_shard(record, name) for name in record.tensors if name not in rows.names
        },
    )  # fmt: skip


def named_shard(record: Record, name: str) -> NamedShard:
    """Read where a shard lies from `about["shards"][name]`: {global_shape, offset}."""
    said = mapping(mapping(record.about.get("shards")).get(name))
    shape = tuple(record.tensors[name][1])
    whole = _shape(said.get("global_shape"), len(shape))
    offset = _shape(said.get("offset"), len(shape))
    if whole is None or offset is None:
        return NamedShard(shape)
    inside = all(o + s <= w for o, s, w in zip(offset, shape, whole, strict=True))
    return NamedShard(shape, whole, offset) if inside else NamedShard(shape)


def row_label(place: Place, row: int) -> str:
    """Return what to call a row that has no id."""
    where = str(place._replace(step=None))
    return f"row {row}" if where == "one file" else f"{where}, row {row}"


def samples_of(record: Record) -> tuple[str, ...] | None:
    """Return the sample id of each row."""
    return record.samples


def runs_of(record: Record) -> tuple[str, ...] | None:
    """Return group_id and run_id of each row, joined."""
    groups, runs = record.groups, record.row_texts.get("run_id")
    if groups is None or runs is None:
        return None
    return tuple(f"{group}_{run}" for group, run in zip(groups, runs, strict=True))


def mapping(value: Any) -> Mapping[str, Any]:
    """Return what should be a mapping, nothing if it is none."""
    return value if isinstance(value, Mapping) else {}


def _shape(value: Any, dimensions: int) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple) or len(value) != dimensions:
        return None
    return tuple(value) if all(isinstance(each, int) and each >= 0 for each in value) else None
