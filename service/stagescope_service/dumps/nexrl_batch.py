"""The complete batch of a step, as NexRL's file of the old log-probs holds it.

NexRL's file has one tensor, `old_log_probs` of every sample. Here it also has the tensors that
determine the mismatch of these log-probs: the rollout's log-probs, the mask, and others that the
ranks recorded with them. Samples that context-parallel ranks share are assembled first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, cast

import numpy as np

from stagescope_service.dumps.joining.join import Selection, join
from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.dumps.records import Dump, DumpContents, DumpEntry, Location, mapping
from stagescope_service.rows.positions import POSITION_TENSORS
from stagescope_service.rows.ragged import Int64
from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire.batch import Batch
from stagescope_wire.schema import Part

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
