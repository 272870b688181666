"""A batch as other projects have it; what is heavy is imported where it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from stagescope.batch.data import BatchData, Tensor
from stagescope.batch.trajectories import Trajectory, trajectories
from stagescope.wire.errors import MissingExtra

if TYPE_CHECKING:
    import tensordict
    import torch

    from verl import DataProto  # pyright: ignore[reportMissingImports]

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
    # torch reads 16 bits as bfloat16 from its own int16; of numpy it takes uint16 as a number.
    return values.view(torch.bfloat16) if tensor.dtype == "bfloat16" else values


def tensordict_of(batch: BatchData) -> tensordict.TensorDict:
    """Return a TensorDict with batch size [rows].

    Strings are a `NonTensorStack` of the rows; what has no rows (a loss) and `meta` are non-tensor
    data of the whole.

    Raises:
        MissingExtra: tensordict is not installed.
    """
    try:
        import tensordict
    except ImportError as error:
        raise _missing("tensordict") from error
    of_rows = {name: value for name, value in torch_tensors(batch).items() if name in batch.tensors}
    found = tensordict.TensorDict(of_rows, batch_size=[batch.rows])
    for name, texts in batch.strings.items():
        found[name] = tensordict.NonTensorStack(*texts)
    for name, other in batch.others.items():
        found.set_non_tensor(name, _torch_tensor(other))
    found.set_non_tensor("meta", dict(batch.meta))
    return found


def dataproto(batch: BatchData) -> DataProto:
    """Return a DataProto.

    `non_tensor_batch` has the strings, group ids also as verl's `uid`; `meta_info` has
    `global_steps`, the batch's `meta`, and what has no rows (a loss).

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
    meta: dict[str, Any] = {**batch.meta, **{n: _torch_tensor(t) for n, t in batch.others.items()}}
    if batch.step is not None:
        meta["global_steps"] = batch.step
    return DataProto.from_dict(
        tensors={
            name: value for name, value in torch_tensors(batch).items() if name in batch.tensors
        },
        non_tensors={name: np.array(list(column), object) for name, column in texts.items()},
        meta_info=meta,
    )


def nexrl_trajectories(batch: BatchData) -> list[dict[str, Any]]:
    """Return a dict a row as NexRL's DataDumper writes them, in the order of the rows.

    `tokens` and `loss_mask` are of the whole trajectory, prompt first. A run_id that is a number
    is an int, as NexRL has it.

    Raises:
        NotFound: no `prompts`, `responses` or `response_mask` were kept.
    """
    temperature = (batch.meta.get("sampling") or {}).get("temperature")
    return [_nexrl_trajectory(each, temperature) for each in trajectories(batch)]


def _nexrl_trajectory(one: Trajectory, temperature: Any) -> dict[str, Any]:
    tokens = one.all_tokens()
    before = [0] * (len(tokens) - len(one.tensor("responses")))
    extra: dict[str, Any] = {
        "group_id": one.group_id,
        "run_id": int(one.run_id) if one.run_id.isdecimal() else one.run_id,
        **{name: one.strings[name] for name in _EXTRA if name in one.strings},
        **({} if one.reward is None else {"score": one.reward}),
        **({} if temperature is None else {"temperature": temperature}),
    }
    found: dict[str, Any] = {
        "tokens": tokens,
        "loss_mask": [*before, *one.tensor("response_mask").astype(np.int64).tolist()],
        "reward": one.reward,
        "is_val": one.strings.get("split") == "val",
        "extra_fields": extra,
    }
    if "advantages" in one.tensors:
        found["advantages"] = [*map(float, before), *one.tensors["advantages"].tolist()]
    return found


def slime_samples(batch: BatchData) -> list[dict[str, Any]]:
    """Return a dict a row with the fields of slime's `Sample.to_dict()`.

    `tokens` are prompt and response, `loss_mask` and `rollout_log_probs` as long as the response.
    `group_index` counts groups in the order of the rows; the ids themselves are in `metadata`.
    Texts that were not recorded (`prompt`, `response`) are empty.

    Raises:
        NotFound: no `prompts`, `responses` or `response_mask` were kept.
    """
    groups: dict[str, int] = {}
    return [
        _slime_sample(batch.step, each, groups.setdefault(each.group_id, len(groups)))
        for each in trajectories(batch)
    ]


def _slime_sample(step: int | None, one: Trajectory, group: int) -> dict[str, Any]:
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
