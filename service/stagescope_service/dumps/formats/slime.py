"""slime's debug files: `--save-debug-rollout-data` and `--save-debug-train-data` (version 2).

A rollout file is `{rollout_id, samples}`, a train file `{format_version: 2, rollout_id, rank,
samples, dp_shards, ...}`; the user names both. All per-token values of a sample except `tokens`
cover its response alone, unshifted and ragged, and so they do in the records. A sample is named by
its `index`, which both files have; its group is `group_index`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from stagescope_service.dumps.formats.columns import (
    Columns,
    RowIds,
    collect_rows,
    unique_samples,
)
from stagescope_service.dumps.formats.content import read_shared
from stagescope_service.dumps.formats.listing import FileFormat, ListedFile, saved_place
from stagescope_service.dumps.formats.odd_values import (
    NamedRow,
    fitting_rows,
    left_out_problem,
    objects_in,
)
from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.dumps.records import DumpContents, DumpEntry, Location
from stagescope_service.rows.ragged import cumulative, slice_indexes
from stagescope_wire.errors import InvalidTensor

ROLLOUT_STAGE: Final = "rollout_generate"
EVAL_STAGE: Final = "eval"
TRAIN_STAGE: Final = "actor_update"

_NAMES: Final = {"loss_mask": "response_mask", "loss_masks": "response_mask", "reward": "rewards"}
_TRAIN_NAMES: Final = {**_NAMES, "log_probs": "old_log_probs"}  # before the step's updates
_SKIPPED: Final = frozenset(
    {"response_length", "response_lengths", "total_lengths", "group_index", "index",
     "sample_index", "weight_versions"}
)  # fmt: skip
_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "old_log_probs": ("old_log_probs", "ref_log_probs", "teacher_log_probs"),
    "forward_data": ("entropy",),
    "advantages": ("values", "advantages", "returns", "kl", "opd_reverse_kl"),
}
"""Sections of a train file other than its trajectories, with their tensors."""
_PER_TOKEN: Final = (
    "loss_mask", "loss_masks", "rollout_log_probs", "log_probs", "ref_log_probs",
    "teacher_log_probs", "entropy", "values", "advantages", "returns",
)  # fmt: skip
"""Values of the tokens of the response, by their names in the file."""
_MASKS: Final = ("loss_mask", "loss_masks")


def _entries_of(
    found: ListedFile, location: Location, values: Sequence[str | int]
) -> list[DumpEntry]:
    if "rollout_id" not in values[:8] or "samples" not in values[:16]:
        return []
    index = values.index("rollout_id") + 1
    step = values[index] if index < len(values) else None
    is_train = "format_version" in values[:2]
    stage = TRAIN_STAGE if is_train else ROLLOUT_STAGE
    if not is_train and "eval_" in found.path.stem:
        stage = EVAL_STAGE
    location = Location(step if isinstance(step, int) else None, stage)
    sections = ["trajectories"]
    if is_train:
        names = {_TRAIN_NAMES.get(str(value), str(value)) for value in values}
        sections += [name for name, tensors in _SECTIONS.items() if not names.isdisjoint(tensors)]
    return [DumpEntry(section, location, found.path, found.bytes, section) for section in sections]


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one section of a file; see `records.Dump.read`."""
    data = read_shared(entry.path)
    samples = data.get("samples") if isinstance(data, dict) else None
    listed = samples if isinstance(samples, list) else [None]
    objects, wrong = objects_in(listed, "sample at")
    if not isinstance(data, dict) or (wrong and not objects):
        raise InvalidTensor(f"{entry.path} holds no list of samples", expected="slime's debug data")
    is_train = "format_version" in data
    if is_train and data["format_version"] != 2:
        raise InvalidTensor(
            f"{entry.path} has format version {data['format_version']!r}", expected="2"
        )
    names = _TRAIN_NAMES if is_train else _NAMES
    elsewhere = {name for section in _SECTIONS.values() for name in section} if is_train else set()
    own = _SECTIONS.get(entry.section)
    fitted, unfit = fitting_rows(
        [_named_row(name, _plain_sample(row)) for name, row in objects],
        per_token=_PER_TOKEN,
        masks=_MASKS,
    )
    rows = [row.values for row in fitted]
    problems = left_out_problem(entry, {**wrong, **unfit}, len(listed))
    given = {name: names.get(name, name) for name in {*itertools.chain.from_iterable(rows)}}
    skipped = {
        name
        for name, ours in given.items()
        if (ours in elsewhere if own is None else ours not in (*own, "response_mask"))
    }
    found = collect_rows(rows, names=names, skip=_SKIPPED | skipped)
    if entry.section == "trajectories":
        _add_responses(found, rows)
        _add_versions(found, rows)
        removed = sum(bool(row.get("remove_sample")) for row in rows)
        found.about |= {"removed_samples": removed} if removed else {}
        for name in data.keys() - {"samples", "format_version", "raw_reward"}:
            found.add_about(name, data[name])
        found.add("raw_rewards", data.get("raw_reward"))
    found.about["alignment"] = "responses alone, not shifted"
    groups, sample_uids = _row_ids(rows, found)
    return found.contents(
        entry,
        samples=sample_uids,
        groups=groups,
        masks=["response_mask"],
        problems=problems,
        rows=[row.name for row in fitted],
    )


def _plain_sample(row: dict[str, FileValue]) -> dict[str, FileValue]:
    """Add slime's implicit mask: ones if a sample has no mask, zeros if it was removed."""
    length = _length(row)
    name = "loss_masks" if "loss_masks" in row else "loss_mask"
    if row.get("remove_sample") or row.get(name) is None:
        mask: list[FileValue] = [0 if row.get("remove_sample") else 1] * length
        row = {**row, name: mask}
    reward = row.get("reward")
    if isinstance(reward, dict):
        row = {**row, **{f"rewards/{each}": value for each, value in reward.items()}}
        del row["reward"]
    return row


def _named_row(name: str, row: dict[str, FileValue]) -> NamedRow:
    index = row.get("index", row.get("sample_index"))
    return NamedRow(name if index is None else f"sample {_scalar(index)}", row, _length(row))


def _length(row: Mapping[str, FileValue]) -> int:
    length = row.get("response_length", row.get("response_lengths"))
    return length if isinstance(length, int) and 0 <= length < 1 << 40 else 0


def _add_responses(found: Columns, rows: list[dict[str, FileValue]]) -> None:
    """Add `responses`: the last `response_length` of each row's tokens."""
    if "tokens" not in found.tensors:
        return
    tag, _, flat, offsets = found.tensors["tokens"]
    if offsets is None:
        return
    lengths = np.array([_length(row) for row in rows], np.int64)
    if (lengths > np.diff(offsets)).any():
        found.left_out["responses"] = "a response is longer than the tokens of its sample"
        return
    responses = flat[slice_indexes(offsets[1:] - lengths, lengths)]
    found.tensors["responses"] = (tag, responses.shape, responses, cumulative(lengths))


def _add_versions(found: Columns, rows: list[dict[str, FileValue]]) -> None:
    """Add the first policy version of each sample; add all as texts if a sample has several."""
    versions = [_versions(row.get("weight_versions")) for row in rows]
    mixed = sum(len(each) > 1 for each in versions)
    if mixed:
        found.texts["weight_versions"] = tuple(" ".join(each) for each in versions)
        found.about["samples_of_mixed_versions"] = mixed
    if all(versions) and rows:
        first: list[FileValue] = [each[0] for each in versions]
        found.add("versions", first)
    elif any(versions):
        found.left_out["versions"] = f"{versions.count([])} samples have none"


def _versions(value: FileValue) -> list[str]:
    if isinstance(value, FileTensor):
        value = value.wire[2].reshape(-1).tolist()
    if isinstance(value, str | int):
        return [str(value)]
    return [*dict.fromkeys(map(str, value))] if isinstance(value, list | dict) else []


def _row_ids(rows: list[dict[str, FileValue]], found: Columns) -> tuple[RowIds, RowIds]:
    indices = [row.get("index", row.get("sample_index")) for row in rows]
    groups = [row.get("group_index") for row in rows]
    samples = None
    if rows and None not in indices:
        samples = unique_samples([str(_scalar(index)) for index in indices], found)
    if not rows or None in groups:
        return None, samples
    return tuple(str(_scalar(group)) for group in groups), samples


def _scalar(value: FileValue) -> object:
    return value.wire[2].reshape(-1)[0] if isinstance(value, FileTensor) else value


FORMAT: Final = FileFormat(
    kind="slime",
    layout="slime's debug data (*.pt of --save-debug-rollout-data or --save-debug-train-data)",
    title="slime's debug data",
    section="trajectories",
    place_of=saved_place,
    read=read_entry,
    peeked=400,  # of a train file: up to the names in its first sample
    entries_of=_entries_of,
)
