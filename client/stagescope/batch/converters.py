"""Convert a batch to the types of other projects, which are imported on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from stagescope.batch.data import BatchData, Tensor
from stagescope.batch.trajectories import Trajectory, trajectories
from stagescope.wire.errors import MissingExtra
from stagescope.wire.nonfinite import Json

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
