"""The rows of a batch as trajectories without padding, identified by (group_id, run_id)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stagescope.batch.data import BatchData, widened
from stagescope.wire.errors import NotFound
from stagescope.wire.tensorfile import Array

KEEP: Final = "keep trajectories: stagescope capture --keep trajectories, or init(keep=...)"


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """One row without its padding.

    Attributes:
        group_id: its group (prompt); '' if unknown.
        run_id: which of the group's samples it is (sample_index).
        sample_id: its sample_uid; '' if unknown.
        step: the step in which it was recorded.
        row: its row in the batch.
        prompt: token ids; None if prompts were not kept.
        tensors: tensors as wide as the responses, from the first to the last response token;
            bfloat16 becomes float32, which is exact.
        values: tensors with one number per row (rewards), by name.
        strings: texts of the row by name.
    """

    group_id: str
    run_id: str
    sample_id: str
    step: int | None
    row: int
    prompt: Array | None
    tensors: Mapping[str, Array]
    values: Mapping[str, float]
    strings: Mapping[str, str]

    @property
    def reward(self) -> float | None:
        """The row's reward; for token rewards the sum over the model's tokens, in float64."""
        if "rewards" in self.values:
            return float(self.values["rewards"])
        if "rewards" not in self.tensors:
            return None
        token_rewards = np.asarray(self.tensors["rewards"], np.float64)
        return float(token_rewards[self.tensor("response_mask") != 0].sum())

    def tensor(self, name: str) -> Array:
        """Return a tensor.

        Raises:
            NotFound: it was not kept; the message says how to keep it.
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

    A run_id that was not recorded is the sample_uid without its group_id prefix, else the index of
    the row within its group.
    """
    groups = batch.strings.get("group_ids") or ("",) * batch.rows
    runs = batch.strings.get("run_ids") or batch.strings.get("run_id")
    if runs is None:
        runs = _derived_run_ids(batch, groups)
    return list(zip(groups, runs, strict=True))


def _derived_run_ids(batch: BatchData, groups: Sequence[str]) -> tuple[str, ...]:
    samples = batch.sample_ids or ("",) * batch.rows
    seen: dict[str, int] = {}
    run_ids = []
    for group, sample in zip(groups, samples, strict=True):
        index = seen[group] = seen.get(group, -1) + 1
        suffix = sample.removeprefix(group).lstrip("_-/.:#") if group else sample
        is_named = bool(suffix) and (not group or suffix != sample)
        run_ids.append(suffix if is_named else str(index))
    return tuple(run_ids)


def response_spans(batch: BatchData) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the begin and the end of each row's response in tensors as wide as `response_mask`.

    They follow from the recorded lengths of ragged rows, else from the `attention_mask`. Without
    both, a response ends with its last token that the model generated or that is not padding
    (`turn_ids` from 0, or a token other than the padding's).

    Raises:
        NotFound: the batch has no `response_mask`.
    """
    mask = _required(batch, "response_mask")
    rows, width = mask.shape
    lengths = batch.lengths.get("response_mask", batch.lengths.get("responses"))
    if lengths is not None:
        is_response = np.arange(width) < lengths[:, None]
        is_response = (
            is_response if batch.side("response_mask") == "right" else is_response[:, ::-1]
        )
    elif "attention_mask" in batch and batch["attention_mask"].shape[1] >= width:
        is_response = batch["attention_mask"][:, batch["attention_mask"].shape[1] - width :] != 0
    else:
        is_response = mask != 0
        if "turn_ids" in batch and batch["turn_ids"].shape == mask.shape:
            is_response = is_response | (batch["turn_ids"] >= 0)
        elif "responses" in batch and "responses" in batch.padding:
            is_response = is_response | (batch["responses"] != batch.padding["responses"].fill)
    filled = is_response.any(axis=1)
    starts = np.where(filled, is_response.argmax(axis=1), 0)
    if batch.side("response_mask") == "right":
        starts = np.zeros(rows, np.int64)
    ends = np.where(filled, width - is_response[:, ::-1].argmax(axis=1), starts)
    return starts.astype(np.int64), ends.astype(np.int64)


def prompts_of(batch: BatchData) -> list[Array] | None:
    """Return the token ids of each row's prompt without padding; None if none were kept."""
    if "prompts" not in batch:
        return None
    prompts = batch["prompts"]
    rows, width = prompts.shape
    if "prompts" in batch.lengths:
        lengths = batch.lengths["prompts"]
        starts = width - lengths if batch.side("prompts") == "left" else np.zeros(rows, np.int64)
        return [prompts[r, starts[r] : starts[r] + lengths[r]] for r in range(rows)]
    if "attention_mask" in batch and batch["attention_mask"].shape[1] >= width:
        is_response = batch["attention_mask"][:, :width] != 0
        return [prompts[row, is_response[row]] for row in range(rows)]
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
    row_values = {n: widened(t) for n, t in batch.tensors.items() if t.values.ndim == 1}
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
            values={name: values[row].item() for name, values in row_values.items()},
            strings={name: texts[row] for name, texts in batch.strings.items()},
        )


def _required(batch: BatchData, name: str) -> Array:
    if name not in batch:
        raise _not_kept(name)
    return batch[name]


def _not_kept(name: str) -> NotFound:
    return NotFound(f"the batch has no {name}", advice=KEEP)
