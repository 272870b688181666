"""Reads the tensors of a step from the batches of verl's drivers, under stagescope's names.

The trainers before V1 use DataProto, and V1 creates one for its metrics; V1's own batch is a
KVBatchMeta: keys and tags of samples whose tensors are in the TransferQueue.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.tensors import ROUTE_TENSORS
from stagescope_workers.integrations.verl.context import SAMPLES

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "dict[str, torch.Tensor]"

_REQUIRED: Final = ("rollout_log_probs", "old_log_probs", "response_mask")
_HALF: Final = ("bfloat16", "float16")


class Keys:
    """The keys of V1's samples, which verl passes without their batch."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def from_list(cls, keys: object) -> Keys | None:
        """Return the keys in a list or tuple; None for anything else."""
        return cls(list(keys)) if isinstance(keys, list | tuple) else None


def is_keys(batch: object) -> bool:
    """Return whether `batch` names samples of the TransferQueue, without their tensors."""
    return isinstance(getattr(batch, "keys", None), list)


def is_v1(trainer: object) -> bool:
    """Return whether a trainer's batches are keys of the TransferQueue."""
    return hasattr(trainer, "replay_buffer")


def is_synchronous(trainer: object) -> bool:
    """Return whether all tokens of a step are sampled with the weights that it begins with.

    Before V1 this is only known for RayPPOTrainer itself: other trainers derive from it.
    """
    if is_v1(trainer):
        return getattr(trainer, "trainer_mode", None) == "sync"
    return type(trainer).__name__ == "RayPPOTrainer"


def log_probs(batch: Any, more: Mapping[str, torch.Tensor] | None = None) -> Tensors:
    """Return the streams, mask, responses and routes of a DataProto; empty without both streams.

    Args:
        batch: The DataProto.
        more: Tensors that are not in it yet.
    """
    tensors = {**_tensors(batch.batch), **_tensors({} if more is None else more)}
    if not all(name in tensors for name in _REQUIRED):
        return {}
    names = (*_REQUIRED, "responses", *ROUTE_TENSORS)
    return {name: tensors[name] for name in names if name in tensors}


def in_float32(batch: Any) -> object:  # verl's DataProto
    """Return a DataProto whose log-probs are at least float32; the same one where they are."""
    tensors = _tensors(batch.batch)
    streams = [name for name in ("rollout_log_probs", "old_log_probs") if name in tensors]
    upcast = {name: at_least_float32(tensors[name]) for name in streams}
    if all(upcast[name] is tensors[name] for name in streams):
        return batch
    copied = batch.batch.clone(recurse=False)
    copied.update(upcast)
    return type(batch)(batch=copied)


def at_least_float32(value: Any) -> object:
    """Return a half-precision tensor in float32, and any other value unchanged."""
    is_half = str(getattr(value, "dtype", "")).removeprefix("torch.") in _HALF
    return value.float() if is_half else value


def _tensors(tensors: Any) -> Tensors:  # a dict or a TensorDict
    # Iterating a TensorDict yields its rows: keys() has its names.
    return {str(name): tensors[name] for name in tensors.keys()}  # noqa: SIM118


def advantages(batch: Any) -> Tensors:
    """Return the advantages, returns, mask, importance weights and rewards of a DataProto.

    `response_mask` is the one that the update uses, without the tokens that verl rejected; rewards
    are summed over the tokens of a row.
    """
    tensors = _tensors(batch.batch)
    names = ("advantages", "returns", "response_mask", "rollout_is_weights")
    found = {name: tensors[name] for name in names if name in tensors}
    scores = next((n for n in ("token_level_scores", "token_level_rewards") if n in tensors), None)
    if scores is not None:
        found["rewards"] = tensors[scores].sum(dim=-1)
    return found


def name_samples(batch: object) -> None:
    """Give each row of a DataProto its sample_uid, group and index, before rows are reordered.

    verl's `uid` names the group; its rollouts are in order until `_balance_batch`.
    """
    others = getattr(batch, "non_tensor_batch", None)
    if others is None or SAMPLES in others or "uid" not in others:
        return
    counts: collections.Counter[str] = collections.Counter()
    names = []
    for group in map(str, others["uid"]):
        names.append(f"{group}_{counts[group]}")
        counts[group] += 1
    others[SAMPLES] = np.array(names, dtype=object)


def ids(batch: Any) -> dict[str, list[str]]:
    """Return sample_ids and group_ids of a DataProto or a KVBatchMeta; empty where it has none."""
    if is_keys(batch):
        # V1's key is {uid}_{rollout}_{output}.
        groups = [str(key).rsplit("_", 2)[0] for key in batch.keys]
        return {"sample_ids": list(batch.keys), "group_ids": groups}
    name_samples(batch)
    others = getattr(batch, "non_tensor_batch", None) or {}
    if SAMPLES not in others:
        return {}
    found = {"sample_ids": [str(name) for name in others[SAMPLES]]}
    if "uid" in others:
        found["group_ids"] = [str(group) for group in others["uid"]]
        found |= _prompt_hashes(others, len(set(found["group_ids"])))
    return found


def _prompt_hashes(others: Mapping[str, Any], groups: int) -> dict[str, list[str]]:
    """Return data source and dataset index of each row, where they distinguish the groups."""
    extra = others.get("extra_info")
    if extra is None or not all(isinstance(row, dict) and "index" in row for row in extra):
        return {}
    sources = others.get("data_source", [""] * len(extra))
    names = [f"{source}:{row['index']}" for source, row in zip(sources, extra, strict=True)]
    return {"prompt_hashes": names} if len(set(names)) == groups else {}


def constant_versions(version: int, rows: int) -> dict[str, object]:
    """Return the policy version of each of `rows` samples, which is the same for all."""
    return {"versions": np.full(rows, version, dtype=np.int64)}


def versions(batch: object) -> dict[str, object]:
    """Return the policy version of each sample of a KVBatchMeta, where every sample has one.

    A trajectory of several versions gets its oldest; the number of these is returned too.
    """
    tags: Sequence[JsonObject] | None = getattr(batch, "tags", None)
    if not tags:
        return {}
    oldest = [tag.get("min_global_steps") for tag in tags]
    if not all(isinstance(version, int) for version in oldest):
        return {}
    mixed = sum(tag.get("max_global_steps") != tag.get("min_global_steps") for tag in tags)
    return {
        "versions": np.array(oldest, dtype=np.int64),
        "samples_of_mixed_versions": mixed,
    }
