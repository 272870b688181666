"""Rows of a record as NexRL's dicts of lists: trajectories and datums."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from stagescope_service.dumps.pickles.torch_file import FileTensor
from stagescope_service.dumps.records import Record
from stagescope_service.store.tensorfile import WireTensor

Array = np.ndarray[Any, Any]

_EXTRA_FIELDS: Final = ("group_id", "run_id", "uid", "task_id", "score", "temperature")
SAID_OF_A_TRAJECTORY: Final = frozenset(
    {
        "tokens", "loss_mask", "response_mask", "attention_mask", "rewards", "advantages",
        "is_val", *_EXTRA_FIELDS,
    }
)  # fmt: skip
"""Tensors that find a place in NexRL's trajectories."""
_NUMBERS: Final = ("run_id", "task_id")


def widened(tensor: WireTensor) -> Array:
    """Return a tensor's values; bfloat16 as float32, which is exact."""
    tag, _, values, _ = tensor
    if tag == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def values_of(tensor: WireTensor, *, exact: bool = True) -> Sequence[Array]:
    """Return the rows of a tensor: of ragged ones each with its own length.

    Args:
        tensor: [rows], [rows, ...] or ragged.
        exact: bfloat16 stays as it travels; else it is widened.
    """
    values, offsets = tensor[2] if exact else widened(tensor), tensor[3]
    if offsets is None:
        return list(values)
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def padded(rows: Sequence[Array]) -> Array:
    """Return rows as one array [rows, width], padded on the right with 0."""
    width = max((len(row) for row in rows), default=0)
    found = np.zeros((len(rows), width), rows[0].dtype if rows else np.float32)
    for row, values in enumerate(rows):
        found[row, : len(values)] = values
    return found


def rows_of(record: Record) -> Iterator[dict[str, Any]]:
    """Yield each row of a record: name -> array, number or text; `group_id` and `run_id` too."""
    columns: dict[str, Sequence[Any]] = {
        name: values_of(wire, exact=False) for name, wire in record.tensors.items()
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


def trajectory(row: Mapping[str, Any], *, is_val: bool = False) -> dict[str, Any]:
    """Return one trajectory as NexRL's DataDumper writes it, and its `advantages` where it has.

    `is_val` is said of a row that does not say it itself.

    A mask of the response alone is put behind zeros for the prompt; what `attention_mask` leaves
    out is padding.
    """
    tokens = row["tokens"]
    mask = row["loss_mask"] if "loss_mask" in row else row["response_mask"]
    mask = np.concatenate([np.zeros(len(tokens) - len(mask), mask.dtype), mask])
    attention = row.get("attention_mask")
    if attention is not None and len(attention) == len(tokens):
        tokens, mask = tokens[attention != 0], mask[attention != 0]
    found: dict[str, Any] = {
        "tokens": tokens.tolist(),
        "loss_mask": mask.astype(np.int64).tolist(),
        "reward": float(np.sum(row["rewards"])) if "rewards" in row else math.nan,
        "is_val": bool(row.get("is_val", is_val)),
    }
    extra = {name: _plain(name, row[name]) for name in _EXTRA_FIELDS if name in row}
    if extra:
        found["extra_fields"] = extra
    if "advantages" in row:
        found["advantages"] = np.asarray(row["advantages"]).tolist()
    return found


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return int(value) if name in _NUMBERS and value.isdecimal() else value
    return np.asarray(value).item()


def datum(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return one datum: names with `/` become nested dicts, arrays lists."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        *above, last = name.split("/")
        inner = found
        for each in above:
            inner = inner.setdefault(each, {})
        inner[last] = value if isinstance(value, str) else np.asarray(value).tolist()
    return found


def lists_in(value: Any) -> Any:
    """Return a tree with every tensor as lists, as JSON holds it."""
    if isinstance(value, FileTensor):
        return widened(value.wire).tolist()
    if isinstance(value, dict):
        return {name: lists_in(item) for name, item in value.items()}
    return value
