"""The tensors of a step as verl's drivers hold them, under stagescope's names.

DataProto is what the trainers before V1 pass along, and what V1 makes for its metrics; V1's own
batch is a KVBatchMeta: keys and tags of samples whose tensors lie in the TransferQueue.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from stagescope_workers.integrations.verl.context import SAMPLES

_TOGETHER: Final = ("rollout_log_probs", "old_log_probs", "response_mask")
_HALF: Final = ("bfloat16", "float16")


class Keys:
    """The keys of V1's samples, where verl passes them without their batch."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, keys: Any) -> Keys | None:
        """Return the keys, or None where there are none."""
        return cls(list(keys)) if isinstance(keys, list | tuple) else None


def is_keys(batch: Any) -> bool:
    """Say whether `batch` names samples of the TransferQueue, and holds no tensors itself."""
    return isinstance(getattr(batch, "keys", None), list)


def is_v1(trainer: Any) -> bool:
    """Say whether a trainer's batches are keys of the TransferQueue."""
    return hasattr(trainer, "replay_buffer")


def is_synchronous(trainer: Any) -> bool:
    """Say whether a step's tokens all come from the weights that the step begins with.

    Of the trainers before V1 only RayPPOTrainer itself is known to work so: others derive from it.
    """
    if is_v1(trainer):
        return getattr(trainer, "trainer_mode", None) == "sync"
    return type(trainer).__name__ == "RayPPOTrainer"


def log_probs(batch: Any, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the streams, mask and responses of a DataProto; empty without both streams.

    Args:
        batch: The DataProto.
        more: Tensors that are not in it yet.
    """
    held = {**_tensors(batch.batch), **_tensors({} if more is None else more)}
    if not all(name in held for name in _TOGETHER):
        return {}
    return {name: held[name] for name in (*_TOGETHER, "responses") if name in held}


def in_float32(batch: Any) -> Any:
    """Return a DataProto whose log-probs are at least float32; the same one where they are."""
    held = _tensors(batch.batch)
    streams = [name for name in ("rollout_log_probs", "old_log_probs") if name in held]
    upcast = {name: at_least_float32(held[name]) for name in streams}
    if all(upcast[name] is held[name] for name in streams):
        return batch
    tensors = batch.batch.clone(recurse=False)
    tensors.update(upcast)
    return type(batch)(batch=tensors)


def at_least_float32(value: Any) -> Any:
    """Return a half-precision tensor in float32, and anything else as it is."""
    is_half = str(getattr(value, "dtype", "")).removeprefix("torch.") in _HALF
    return value.float() if is_half else value


def _tensors(held: Any) -> dict[str, Any]:
    # A TensorDict is iterated over its rows: its names are asked for by keys().
    return {str(name): held[name] for name in held.keys()}  # noqa: SIM118


def outcome(batch: Any) -> dict[str, Any]:
    """Return what a DataProto holds after the advantages were computed.

    `response_mask` is then the one that the update uses, without the tokens that verl rejected;
    rewards are summed over the tokens of a row.
    """
    tensors = _tensors(batch.batch)
    wanted = ("advantages", "returns", "response_mask")
    found = {name: tensors[name] for name in wanted if name in tensors}
    scores = next((n for n in ("token_level_scores", "token_level_rewards") if n in tensors), None)
    if scores is not None:
        found["rewards"] = tensors[scores].sum(dim=-1)
    return found


def name_samples(batch: Any) -> None:
    """Give each row of a DataProto its sample_uid: group and index, before rows change places.

    verl's `uid` names the group; its rollouts lie in order until `_balance_batch`.
    """
    others = getattr(batch, "non_tensor_batch", None)
    if others is None or SAMPLES in others or "uid" not in others:
        return
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for group in map(str, others["uid"]):
        names.append(f"{group}_{seen[group]}")
        seen[group] += 1
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
    return found


def one_version(version: int, rows: int) -> dict[str, Any]:
    """Return the policy version of each of `rows` samples, where it is the same."""
    return {"versions": np.full(rows, version, dtype=np.int64)}


def versions(batch: Any) -> dict[str, Any]:
    """Return the policy version of each sample of a KVBatchMeta, where every sample has one.

    A trajectory that several versions had a hand in counts with its oldest, and is counted.
    """
    tags: Sequence[Mapping[str, Any]] | None = getattr(batch, "tags", None)
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
