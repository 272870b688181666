"""Rows of a batch as trajectories: each with its own length, by (group_id, run_id)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from stagescope.batch.data import BatchData, widened
from stagescope.wire.errors import NotFound

Array = np.ndarray[Any, Any]

KEEP: Final = "keep trajectories: stagescope capture --keep trajectories, or init(keep=...)"


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """One row: padding is cut off.

    Attributes:
        group_id: the group (prompt) that it belongs to; '' where none was said.
        run_id: which of its group's samples it is (sample_index).
        sample_id: its sample_uid; '' where none was said.
        step: the step that it was recorded in.
        row: its row in the batch.
        prompt: token ids; None where prompts were not kept.
        tensors: what is as wide as the responses, from the first to the last token of the response;
            bfloat16 as float32, which is exact.
        values: what is one number a row (rewards), by name.
        strings: texts of the row by name.
    """

    group_id: str
    run_id: str
    sample_id: str
    step: int | None
    row: int
    prompt: Array | None
    tensors: Mapping[str, Array]
    values: Mapping[str, Any]
    strings: Mapping[str, str]

    @property
    def reward(self) -> float | None:
        """The row's reward; of token rewards the sum over the model's tokens, in float64."""
        if "rewards" in self.values:
            return float(self.values["rewards"])
        if "rewards" not in self.tensors:
            return None
        counted = np.asarray(self.tensors["rewards"], np.float64)
        return float(counted[self.tensor("response_mask") != 0].sum())

    def tensor(self, name: str) -> Array:
        """Return a tensor.

        Raises:
            NotFound: it was not kept; says how to keep it.
        """
        if name not in self.tensors:
            raise _not_kept(name)
        return self.tensors[name]

    def all_tokens(self) -> list[int]:
        """Return the ids of the prompt and the response.

        Raises:
            NotFound: one of them was not kept.
        """
        if self.prompt is None:
            raise _not_kept("prompts")
        return [*self.prompt.tolist(), *self.tensor("responses").tolist()]


def keys_of(batch: BatchData) -> list[tuple[str, str]]:
    """Return (group_id, run_id) of each row.

    A run_id that was not said is what a sample_uid has behind its group_id, else the place of the
    row among the rows of its group.
    """
    groups = batch.strings.get("group_ids") or ("",) * batch.rows
    runs = batch.strings.get("run_ids") or batch.strings.get("run_id")
    if runs is None:
        runs = _derived(batch, groups)
    return list(zip(groups, runs, strict=True))


def _derived(batch: BatchData, groups: Sequence[str]) -> tuple[str, ...]:
    samples = batch.sample_ids or ("",) * batch.rows
    seen: dict[str, int] = {}
    found = []
    for group, sample in zip(groups, samples, strict=True):
        place = seen[group] = seen.get(group, -1) + 1
        behind = sample.removeprefix(group).lstrip("_-/.:#") if group else sample
        is_named = bool(behind) and (not group or behind != sample)
        found.append(behind if is_named else str(place))
    return tuple(found)


def response_spans(batch: BatchData) -> tuple[Array, Array]:
    """Return where each row's response begins and ends in what is as wide as `response_mask`.

    Ragged rows know their lengths, and an `attention_mask` says them; else a response ends with
    its last token that is the model's or that is no padding (`turn_ids` from 0, or another token
    than the padding's).

    Raises:
        NotFound: no `response_mask`.
    """
    mask = _needed(batch, "response_mask")
    rows, width = mask.shape
    lengths = batch.lengths.get("response_mask", batch.lengths.get("responses"))
    if lengths is not None:
        there = np.arange(width) < lengths[:, None]
        there = there if batch.side("response_mask") == "right" else there[:, ::-1]
    elif "attention_mask" in batch and batch["attention_mask"].shape[1] >= width:
        there = batch["attention_mask"][:, batch["attention_mask"].shape[1] - width :] != 0
    else:
        there = mask != 0
        if "turn_ids" in batch and batch["turn_ids"].shape == mask.shape:
            there = there | (batch["turn_ids"] >= 0)
        elif "responses" in batch and "responses" in batch.padding:
            there = there | (batch["responses"] != batch.padding["responses"].fill)
    filled = there.any(axis=1)
    starts = np.where(filled, there.argmax(axis=1), 0)
    if batch.side("response_mask") == "right":
        starts = np.zeros(rows, np.int64)
    ends = np.where(filled, width - there[:, ::-1].argmax(axis=1), starts)
    return starts.astype(np.int64), ends.astype(np.int64)


def prompts_of(batch: BatchData) -> list[Array] | None:
    """Return the token ids of each row's prompt without its padding; None where none were kept."""
    if "prompts" not in batch:
        return None
    prompts = batch["prompts"]
    rows, width = prompts.shape
    if "prompts" in batch.lengths:
        lengths = batch.lengths["prompts"]
        starts = width - lengths if batch.side("prompts") == "left" else np.zeros(rows, np.int64)
        return [prompts[r, starts[r] : starts[r] + lengths[r]] for r in range(rows)]
    if "attention_mask" in batch and batch["attention_mask"].shape[1] >= width:
        there = batch["attention_mask"][:, :width] != 0
        return [prompts[row, there[row]] for row in range(rows)]
    return [prompts[row] for row in range(rows)]


def trajectories(batch: BatchData) -> Iterator[Trajectory]:
    """Yield the rows of a batch as trajectories, in order.

    Raises:
        NotFound: the batch has no `response_mask`.
    """
    starts, ends = response_spans(batch)
    width = batch["response_mask"].shape[1]
    prompts = prompts_of(batch)
    wide = {
        name: widened(tensor)
        for name, tensor in batch.tensors.items()
        if tensor.values.ndim > 1 and tensor.values.shape[1] == width and name != "prompts"
    }
    single = {n: widened(t) for n, t in batch.tensors.items() if t.values.ndim == 1}
    samples = batch.sample_ids or ("",) * batch.rows
    for row, (group, run) in enumerate(keys_of(batch)):
        span = slice(starts[row], ends[row])
        yield Trajectory(
            group_id=group,
            run_id=run,
            sample_id=samples[row],
            step=batch.step,
            row=row,
            prompt=None if prompts is None else prompts[row],
            tensors={name: values[row, span] for name, values in wide.items()},
            values={name: values[row].item() for name, values in single.items()},
            strings={name: texts[row] for name, texts in batch.strings.items()},
        )


def _needed(batch: BatchData, name: str) -> Array:
    if name not in batch:
        raise _not_kept(name)
    return batch[name]


def _not_kept(name: str) -> NotFound:
    return NotFound(f"the batch has no {name}", advice=KEEP)
