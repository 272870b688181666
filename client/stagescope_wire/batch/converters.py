"""The rows of a batch as trajectories, and as the types of other projects, imported on demand."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from stagescope_wire.batch.data import BatchData, Gap, Tensor, widened
from stagescope_wire.errors import MissingExtra, NotFound
from stagescope_wire.nonfinite import Json
from stagescope_wire.tensorfile import Array

if TYPE_CHECKING:
    import tensordict
    import torch

    from verl import DataProto  # pyright: ignore[reportMissingImports]

KEEP: Final = (
    "record prompts and responses (token ids) with the log-probs; for older steps keep them: "
    "stagescope capture --keep trajectories, or init(keep=...)"
)


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
        gaps: of its batch.
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
    gaps: Sequence[Gap] = ()

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
            raise _not_kept(name, self.gaps)
        return self.tensors[name]

    def all_tokens(self) -> list[int]:
        """Return the ids of the prompt and the response.

        Raises:
            NotFound: one of them was not kept.
        """
        if self.prompt is None:
            raise _not_kept("prompts", self.gaps)
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


def unpadded_prompts(batch: BatchData) -> list[Array] | None:
    """Return what `prompts_of` returns, also without padding that no length or mask tells.

    The padding is the id that makes up the longest run of equal ids at a row's begin. Each row
    keeps as many of them as the row with the fewest has, so a begin that all rows have stays.
    """
    prompts = prompts_of(batch)
    if prompts is None or "prompts" in batch.lengths or "attention_mask" in batch:
        return prompts
    runs = [run_length(prompt) for prompt in prompts]
    longest = int(np.argmax(runs)) if runs else 0
    if not runs or not runs[longest]:
        return prompts
    fill = prompts[longest][0]
    padded = [
        run if run and prompt[0] == fill else 0 for prompt, run in zip(prompts, runs, strict=True)
    ]
    least = min(padded)
    return [prompt[max(run - least, 0) :] for prompt, run in zip(prompts, padded, strict=True)]


def run_length(ids: Array) -> int:
    """Return the number of equal ids at the begin."""
    others = np.flatnonzero(ids != ids[0]) if len(ids) else ids
    return int(others[0]) if len(others) else len(ids)


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
            gaps=batch.gaps,
        )


def _required(batch: BatchData, name: str) -> Array:
    if name not in batch:
        raise _not_kept(name, batch.gaps)
    return batch[name]


def _not_kept(name: str, gaps: Iterable[Gap]) -> NotFound:
    """Return the error that a batch lacks a tensor, with the reason where the batch knows it."""
    reasons = [gap.message for gap in gaps if re.search(rf"\b{re.escape(name)}\b", gap.message)]
    return NotFound(": ".join([f"the batch has no {name}", *reasons[:1]]), advice=KEEP)


_EXTRA: Final = ("uid", "task_id")


def torch_tensors(batch: BatchData) -> dict[str, torch.Tensor]:
    """Return every tensor by name, a copy on the host with the dtype and the bits as recorded.

    Raises:
        MissingExtra: torch is not installed.
    """
    return {name: _torch_tensor(batch.tensor(name)) for name in batch}


def _torch_tensor(tensor: Tensor) -> torch.Tensor:
    try:
        import torch
    except ImportError as error:
        raise _missing("torch") from error
    values = torch.from_numpy(tensor.values.copy())
    # from_numpy gives a uint16 tensor of integers; the view reinterprets its bits as bfloat16.
    return values.view(torch.bfloat16) if tensor.dtype == "bfloat16" else values


def tensordict_of(batch: BatchData) -> tensordict.TensorDict:
    """Return a TensorDict with batch size [rows].

    Strings are a `NonTensorStack` of the rows; tensors without rows (a loss) and `meta` are
    non-tensor data of the batch.

    Raises:
        MissingExtra: tensordict is not installed.
    """
    try:
        import tensordict
    except ImportError as error:
        raise _missing("tensordict") from error
    with_rows = {name: _torch_tensor(tensor) for name, tensor in batch.tensors.items()}
    converted = tensordict.TensorDict(with_rows, batch_size=[batch.rows])
    for name, texts in batch.strings.items():
        converted[name] = tensordict.NonTensorStack(*texts)
    for name, other in batch.others.items():
        converted.set_non_tensor(name, _torch_tensor(other))
    converted.set_non_tensor("meta", dict(batch.meta))
    return converted


def dataproto(batch: BatchData) -> DataProto:
    """Return a DataProto.

    `non_tensor_batch` has the strings, and the group ids also as verl's `uid`; `meta_info` has
    `global_steps`, the batch's `meta`, and tensors without rows (a loss).

    Raises:
        MissingExtra: verl is not installed.
    """
    try:
        from verl import DataProto  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise _missing("verl") from error
    texts = dict(batch.strings)
    if "group_ids" in texts:
        texts.setdefault("uid", texts["group_ids"])
    meta: dict[str, object] = {
        **batch.meta,
        **{n: _torch_tensor(t) for n, t in batch.others.items()},
    }
    if batch.step is not None:
        meta["global_steps"] = batch.step
    return DataProto.from_dict(
        tensors={name: _torch_tensor(tensor) for name, tensor in batch.tensors.items()},
        non_tensors={name: np.array(list(column), object) for name, column in texts.items()},
        meta_info=meta,
    )


def nexrl_trajectories(batch: BatchData) -> list[dict[str, Json]]:
    """Return one dict per row in the format of NexRL's DataDumper.

    `tokens`, `loss_mask` and the rollout's `extra_fields["logprobs"]` (0.0 in the prompt) cover the
    prompt and the response. A run_id that is a number is an
    int, as in NexRL.

    Raises:
        NotFound: no `prompts`, `responses` or `response_mask` were kept.
    """
    temperature = (batch.meta.get("sampling") or {}).get("temperature")
    return [_nexrl_trajectory(trajectory, temperature) for trajectory in trajectories(batch)]


def _nexrl_trajectory(one: Trajectory, temperature: float | None) -> dict[str, Json]:
    tokens = one.all_tokens()
    before = [0] * (len(tokens) - len(one.tensor("responses")))
    extra: dict[str, Json] = {
        "group_id": one.group_id,
        "run_id": int(one.run_id) if one.run_id.isdecimal() else one.run_id,
        **{name: one.strings[name] for name in _EXTRA if name in one.strings},
        **({} if one.reward is None else {"score": one.reward}),
        **({} if temperature is None else {"temperature": temperature}),
    }
    if "rollout_log_probs" in one.tensors:
        log_probs = one.tensors["rollout_log_probs"].tolist()
        extra["logprobs"] = [*map(float, before), *map(float, log_probs)]
    fields: dict[str, Json] = {
        "tokens": tokens,
        "loss_mask": [*before, *one.tensor("response_mask").astype(np.int64).tolist()],
        "reward": one.reward,
        "is_val": one.strings.get("split") == "val",
        "extra_fields": extra,
    }
    if "advantages" in one.tensors:
        fields["advantages"] = [*map(float, before), *one.tensors["advantages"].tolist()]
    return fields


def slime_samples(batch: BatchData) -> list[dict[str, Json]]:
    """Return one dict per row with the fields of slime's `Sample.to_dict()`.

    `tokens` are prompt and response; `loss_mask` and `rollout_log_probs` cover the response only.
    `group_index` numbers the groups in the order of the rows; their ids are in `metadata`. Texts
    that were not recorded (`prompt`, `response`) are empty.

    Raises:
        NotFound: no `prompts`, `responses` or `response_mask` were kept.
    """
    groups: dict[str, int] = {}
    return [
        _slime_sample(batch.step, one, groups.setdefault(one.group_id, len(groups)))
        for one in trajectories(batch)
    ]


def _slime_sample(step: int | None, one: Trajectory, group: int) -> dict[str, Json]:
    response, mask = one.tensor("responses"), one.tensor("response_mask")
    log_probs = one.tensors.get("rollout_log_probs")
    versions = one.tensors.get("versions", one.values.get("versions"))
    return {
        "group_index": group,
        "index": one.row,
        "rollout_id": step,
        "prompt": one.strings.get("prompt", ""),
        "tokens": one.all_tokens(),
        "response": one.strings.get("response", ""),
        "response_length": len(response),
        "label": one.strings.get("label"),
        "reward": one.reward,
        "loss_mask": mask.astype(np.int64).tolist(),
        "weight_versions": [] if versions is None else np.unique(versions).astype(str).tolist(),
        "rollout_log_probs": None if log_probs is None else log_probs.tolist(),
        "remove_sample": False,
        "status": one.strings.get("status", "completed"),
        "metadata": {"sample_id": one.sample_id, "group_id": one.group_id, "run_id": one.run_id},
        "train_metadata": None,
    }


def _missing(package: str) -> MissingExtra:
    return MissingExtra(
        f"this conversion needs {package}, which is not installed", advice=f"pip install {package}"
    )
