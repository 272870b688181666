"""The rows of a record as NexRL's dicts of lists: trajectories and datums."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.dumps.records import DumpContents
from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire.batch import Tensor
from stagescope_wire.batch import widened as widen
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


def widened(tensor: WireTensor) -> Array:
    """Return a tensor's values; bfloat16 as float32, which is exact."""
    return widen(Tensor(tensor[0], tensor[2]))


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
