"""A step's rows in NexRL's forms: trajectories, datums, and the complete batch of its log-probs.

NexRL's file of the old log-probs has one tensor, `old_log_probs` of every sample. Here it also has
the tensors that determine the mismatch of these log-probs: the rollout's log-probs, the mask, and
others that the ranks recorded with them. Samples that context-parallel ranks share are assembled
first.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias, cast

import numpy as np

from stagescope_service.dumps.joining.join import Selection, join
from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.dumps.records import (
    Dump,
    DumpContents,
    DumpEntry,
    Location,
    mapping,
    widened,
)
from stagescope_service.rows.positions import POSITION_TENSORS
from stagescope_service.rows.ragged import Int64
from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire.batch import Batch
from stagescope_wire.schema import Part
from stagescope_wire.tensorfile import Array

RowValue: TypeAlias = "str | int | float | Array"
"""A text, or a number or array of a tensor's row."""

_EXTRA_FIELDS: Final = ("group_id", "run_id", "uid", "task_id", "score", "temperature")
TRAJECTORY_TENSORS: Final = frozenset(
    {
        "tokens", "loss_mask", "response_mask", "attention_mask", "rewards", "advantages",
        "is_val", "rollout_log_probs", *_EXTRA_FIELDS,
    }
)  # fmt: skip
"""Tensors that have their own place in NexRL's trajectories; others are extra fields."""
_NUMBERS: Final = ("run_id", "task_id")


def _values_of(tensor: WireTensor) -> Sequence[Array]:
    """Return the rows of a tensor, widened; ragged ones each with its own length."""
    values, offsets = widened(tensor), tensor[3]
    if offsets is None:
        return list(values)
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def rows_of(record: DumpContents) -> Iterator[dict[str, RowValue]]:
    """Yield each row of a record: name -> array, number or text; `group_id` and `run_id` too."""
    columns: dict[str, Sequence[RowValue]] = {
        name: _values_of(wire) for name, wire in record.tensors.items()
    }
    columns |= record.row_texts
    if record.groups is not None:
        columns.setdefault("group_id", record.groups)
    if record.samples is not None and "run_id" not in columns:
        groups = record.groups or ("",) * len(record.samples)
        pairs = zip(record.samples, groups, strict=True)
        columns["run_id"] = [sample.removeprefix(f"{group}_") for sample, group in pairs]
    counts = Counter(map(len, columns.values()))
    rows = counts.most_common(1)[0][0] if counts else 0
    columns = {name: values for name, values in columns.items() if len(values) == rows}
    for row in range(rows):
        yield {name: values[row] for name, values in columns.items()}


def trajectory(row: Mapping[str, RowValue], *, is_val: bool = False) -> dict[str, FileValue]:
    """Return one trajectory as NexRL's DataDumper writes it, with its `advantages` if it has any.

    `is_val` is the default of a row without one.

    If a mask or the rollout's log-probs cover only the response, zeros for the prompt precede them,
    as in `extra_fields["logprobs"]` of NexRL's live trajectories. Tokens outside of
    `attention_mask` are padding. Fields without a name in NexRL keep theirs, in `extra_fields`.
    """
    tokens = np.asarray(row["tokens"])
    mask = np.asarray(row["loss_mask"] if "loss_mask" in row else row["response_mask"])
    mask = np.concatenate([np.zeros(len(tokens) - len(mask), mask.dtype), mask])
    log_probs = np.asarray(row.get("rollout_log_probs", ()), np.float64)
    if len(log_probs):
        log_probs = np.concatenate([np.zeros(len(tokens) - len(log_probs)), log_probs])
    attention = np.asarray(row.get("attention_mask", ()))
    others = {name: value for name, value in row.items() if name not in TRAJECTORY_TENSORS}
    if len(attention) == len(tokens):
        chosen = attention != 0
        for name, value in others.items():
            if np.shape(value) == chosen.shape:
                others[name] = np.asarray(value)[chosen]
        tokens, mask, log_probs = tokens[chosen], mask[chosen], log_probs[chosen[: len(log_probs)]]
    found: dict[str, FileValue] = {
        "tokens": tokens.tolist(),
        "loss_mask": mask.astype(np.int64).tolist(),
        "reward": float(np.sum(np.asarray(row["rewards"]))) if "rewards" in row else math.nan,
        "is_val": bool(row.get("is_val", is_val)),
    }
    extra: dict[str, FileValue] = {
        name: _plain(name, row[name]) for name in _EXTRA_FIELDS if name in row
    }
    extra |= {name: _listed(value) for name, value in others.items()}
    if len(log_probs):
        extra["logprobs"] = log_probs.tolist()
    if extra:
        found["extra_fields"] = extra
    if "advantages" in row:
        found["advantages"] = np.asarray(row["advantages"]).tolist()
    return found


def _listed(value: RowValue) -> FileValue:
    found: FileValue = value if isinstance(value, str) else np.asarray(value).tolist()
    return found


def _plain(name: str, value: RowValue) -> FileValue:
    if isinstance(value, str):
        return int(value) if name in _NUMBERS and value.isdecimal() else value
    found: FileValue = np.asarray(value).item()
    return found


def datum(row: Mapping[str, RowValue]) -> dict[str, FileValue]:
    """Return one datum: names with `/` become nested dicts, arrays lists."""
    found: dict[str, FileValue] = {}
    for name, value in row.items():
        *above, last = name.split("/")
        inner = found
        for each in above:
            below = inner.setdefault(each, {})
            assert isinstance(below, dict)
            inner = below
        inner[last] = value if isinstance(value, str) else np.asarray(value).tolist()
    return found


def lists_in(value: FileValue) -> FileValue:
    """Return a tree in which every tensor is a list, as JSON holds it."""
    if isinstance(value, FileTensor):
        values: FileValue = widened(value.wire).tolist()
        return values
    if isinstance(value, dict):
        return {name: lists_in(item) for name, item in value.items()}
    return value


ROLLOUT_TENSORS: Final = ("rollout_log_probs", "round_ids", "turn_ids", "versions")
"""Tensors of the rollout that the numbers of a step depend on."""
_ROW_IDS: Final = ("sample_ids", "group_ids")
_OLD: Final = "old_log_probs"
_NEVER: Final = ("cu_seqlens", "tokens", "prompts", "loss_mask")
"""Whole rows need no offsets; the others are in the file of the trajectories."""


@dataclasses.dataclass(frozen=True)
class CompleteBatch:
    """Each sample of a step once.

    Attributes:
        tensors: [rows] or [rows, tokens], padded.
        info: NexRL's `batch_info`, with ids and metadata of this project.
        location: the stage of the rows as a place; None if unknown or not unique.
        left_out: facts and data that the batch lacks.
    """

    tensors: Mapping[str, WireTensor]
    info: dict[str, FileValue]
    location: Location | None
    left_out: Sequence[str]

    def fields(self) -> dict[str, FileValue]:
        """Return the content of the file."""
        found: dict[str, FileValue] = {n: FileTensor(wire) for n, wire in self.tensors.items()}
        return {**found, "shape": [*self.tensors[_OLD][1]], "batch_info": self.info}


def complete_batch(
    dump: Dump,
    step: int | None,
    records: Sequence[DumpContents],
    trajectories: Sequence[DumpEntry] | None,
) -> CompleteBatch | None:
    """Join the old log-probs of a step, and what belongs to them; None if there are none.

    Args:
        dump: the dump to read.
        step: the step.
        records: records of the section old_log_probs.
        trajectories: entries of that section; None: return only NexRL's own tensor.
    """
    holders = [record for record in records if _OLD in record.tensors]
    if not holders:
        return None
    stages = {record.entry.stage for record in holders}
    names = {name for record in holders for name in record.tensors}
    others = [entry for entry in trajectories or () if entry.stage not in stages]
    for entry in trajectories or ():
        if entry not in others:
            names |= {*dump.read(entry).tensors}
    if "rollout_log_probs" in names:
        others = []  # what the trainer had of them counts
    for entry in others:
        names |= {*dump.read(entry).tensors}.intersection(ROLLOUT_TENSORS)
    if trajectories is None:
        names &= {_OLD, "response_mask"}
    chosen = {*stages, *(entry.stage for entry in others)}
    batch = join(dump, step, Selection(names.difference(_NEVER), chosen))
    rows = _rows_with(batch, _OLD)
    if _OLD not in batch.tensors or not len(rows):
        return None
    tensors = {
        name: (tensor.dtype, taken.shape, taken, None)
        for name, tensor in batch.tensors.items()
        if name in names and (name not in POSITION_TENSORS or _is_whole(batch, name, rows))
        for taken in [np.ascontiguousarray(tensor.values[rows])]
    }
    first = min(stages, key=lambda stage: _order(batch, stage))
    info = _info(batch, rows, first)
    if any(record.samples is None for record in holders):  # then these are of another stage
        info = {name: value for name, value in info.items() if name not in _ROW_IDS}
    return CompleteBatch(
        tensors,
        info,
        _shared_place([record.entry.location for record in holders]),
        [*_lacking(batch, names - {*tensors, *_NEVER, *POSITION_TENSORS})],
    )


def _order(batch: Batch, stage: str) -> int:
    return next((n for n, part in enumerate(batch.parts) if part.stage == stage), len(batch.parts))


def _rows_with(batch: Batch, name: str) -> Int64:
    rows = [part.rows for part in batch.parts if name in part.names]
    return np.unique(np.concatenate(rows)).astype(np.int64) if rows else np.empty(0, np.int64)


def _is_whole(batch: Batch, name: str, rows: Int64) -> bool:
    """Return whether every row has a tensor of its own, not the pieces of several ranks."""
    parts = [part.rows for part in batch.parts if name in part.names and name not in part.own]
    return bool(parts) and bool(np.isin(rows, np.concatenate(parts)).all())


def _info(batch: Batch, rows: Int64, stage: str) -> dict[str, FileValue]:
    found: dict[str, FileValue] = {"batch_size": len(rows)}
    for name, texts in batch.strings.items():
        if name in _ROW_IDS and all(chosen := [texts[row] for row in rows]):
            found[name] = [*chosen]
    settings, meta = mapping(batch.meta, "settings"), mapping(batch.meta, "stages").get(stage)
    version = {
        part.about["policy_version"]
        for part in batch.parts
        if part.stage == stage and "policy_version" in part.about
    }
    job: dict[str, object] = {"settings": dict(settings)} if settings else {}
    job |= {"policy_version": version.pop()} if len(version) == 1 else {}
    # Both come from JSON.
    kept = {"meta": cast("FileValue", meta), "job": cast("FileValue", job)}
    return {**found, **{name: value for name, value in kept.items() if value}}


def _lacking(batch: Batch, absent: set[str]) -> list[str]:
    found = [f"{gap.kind}: {gap.message}" for gap in batch.gaps if gap.kind != "file"]
    if absent:
        found.append(f"{', '.join(sorted(absent))}: not one value a token or a row")
    ranks = {(part.role, part.rank) for part in batch.parts if _OLD in part.names}
    if len(ranks) > 1:
        found.append(
            f"which of {len(ranks)} ranks recorded which rows: NexRL's file has each row once"
        )
    return found


def _shared_place(locations: Sequence[Location]) -> Location | None:
    first = locations[0]
    if first.stage is None or any(each.stage != first.stage for each in locations):
        return None
    part = Part(first.part.occurrence, first.part.epoch)
    return Location(first.step, first.stage, part=part)
