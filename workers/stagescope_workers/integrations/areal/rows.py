"""AReaL's batches with index t for token t, and its loss's micro-batches as one packed payload.

A rollout's `logprobs`, `loss_mask`, `versions`, `turn_ids` and `input_ids` have index t for token
t. A model's forward pass returns `prox_logp`, `ref_logp`, values and advantages with index t for
token t + 1. `compute_advantages` moves `logprobs` and `loss_mask` there, too; the rest stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from stagescope_wire.tensors import ROUTES_REFUSED

if TYPE_CHECKING:
    from torch import Tensor

_STAYING: Final = {"input_ids": "responses", "versions": "versions", "turn_ids": "turn_ids"}
"""Columns in which index t is always token t, in a rollout and later: AReaL's name -> ours."""


def of_tokens(values: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return a column with token t + 1 at index t as one with token t at index t.

    Args:
        values: [rows, tokens], or packed [tokens].
        cu_seqlens: Where each packed row begins, [rows + 1].

    Returns:
        A new tensor; 0 at the first token of each row, which no forward pass predicts.
    """
    moved = values.detach().roll(1, dims=-1)
    if cu_seqlens is None:
        moved[..., 0] = 0
    else:
        starts = cu_seqlens[:-1].to(moved.device).long()
        moved[starts[starts < moved.shape[-1]]] = 0
    return moved


def unshifted_mask(data: Mapping[str, Tensor]) -> Tensor:
    """Return the mask of a rollout before `compute_advantages`, as of_tokens leaves its log-probs.

    A row's first token has no log-prob of the trainer, whatever the mask says.
    """
    mask = data["loss_mask"].detach().bool().clone()
    mask[..., 0] = False
    return mask


def staying(data: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """Return tokens, versions and turns of a batch, as far as they are as wide as `like`."""
    found = {ours: data.get(theirs) for theirs, ours in _STAYING.items()}
    return {
        name: each for name, each in found.items() if each is not None and _same_shape(each, like)
    }


ROUTES: Final = "rollout_routed_experts"


def routes(found: Tensor, like: Tensor, experts: int | None) -> dict[str, Tensor | str]:
    """Return the experts that the engine chose, [rows, tokens, layers, K], or why they are missing.

    Args:
        found: `routed_experts` of a batch, which a workflow takes from AReaL's `ModelResponse`.
        like: The mask of the batch, [rows, tokens], or packed [tokens].
        experts: K of the model. AReaL has layers and K in one dimension.
    """
    shape = tuple(_shape(found) or [])
    if len(shape) == like.dim() + 1 and experts and shape[-1] % experts == 0:
        found = found.reshape(*shape[:-1], -1, experts)
    if len(_shape(found) or ()) != like.dim() + 2 or shape[0] != like.shape[0]:
        known = experts or "an unknown number of"
        why = f"routed_experts of AReaL's batch is {list(shape)}, with {known} experts a token"
        return {ROUTES_REFUSED: why}
    return {ROUTES: found.detach()}


def before_update(data: Mapping[str, Tensor], trainer: Tensor) -> dict[str, Tensor]:
    """Return both streams of a rollout, and what belongs to its tokens.

    Args:
        data: A batch that `compute_advantages` has not seen, [rows, tokens].
        trainer: The trainer's log-probs of it, index t of token t + 1.

    Raises:
        ValueError: they differ in shape.
    """
    rollout = data["logprobs"]
    if not _same_shape(trainer, rollout):
        raise ValueError(f"log-probs of {_shape(trainer)} for a batch of {_shape(rollout)}")
    return {
        "rollout_log_probs": rollout.detach(),
        "old_log_probs": of_tokens(trainer),
        "response_mask": unshifted_mask(data),
        **staying(data, rollout),
    }


def after_advantages(data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what `compute_advantages` made of a batch, [rows, tokens]: rewards, advantages."""
    mask = data["loss_mask"]
    shifted = {"advantages": "advantages", "returns": "returns", "ref_logp": "ref_log_probs"}
    found = {
        ours: of_tokens(data[theirs])
        for theirs, ours in shifted.items()
        if _same_shape(data.get(theirs), mask)
    }
    rewards = data.get("rewards")
    if rewards is not None and rewards.dim() == 1:
        found["rewards"] = rewards.detach()
    return {**found, "response_mask": of_tokens(mask).bool(), **staying(data, mask)}


def of_loss(
    data: Mapping[str, Tensor], shifted: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[int]]:
    """Return a micro-batch of the loss as flat tensors, and the lengths of its rows.

    Args:
        data: The loss's `input_data`: packed [tokens] with `cu_seqlens`, or [rows, tokens].
        shifted: Columns by our names, `response_mask` included. As wide as its `loss_mask`; index t
            is token t + 1.

    Raises:
        ValueError: it is a part of the sequence (tree attention), so its rows are unknown.
    """
    mask = shifted["response_mask"]
    ends = data.get("cu_seqlens") if mask.dim() == 1 else None
    if any(not _same_shape(each, mask) for each in shifted.values()) or (
        mask.dim() == 1 and ends is None
    ):
        raise ValueError(f"a micro-batch of {_shape(mask)} whose rows cannot be told")
    part = {name: of_tokens(each, ends).reshape(-1) for name, each in shifted.items()}
    part |= {name: each.detach().reshape(-1) for name, each in staying(data, mask).items()}
    if ends is not None:
        return part, (ends[1:] - ends[:-1]).tolist()
    return part, [int(mask.shape[-1])] * (mask.numel() // max(1, mask.shape[-1]))


def count_rows(batch: Iterable[Mapping[str, Tensor]]) -> int:
    """Return how many rows a list of trajectories has; a trajectory may hold a whole group."""
    return sum(int(each["input_ids"].shape[0]) for each in batch)


def _same_shape(one: object, other: Tensor) -> bool:
    return _shape(one) == _shape(other)


def _shape(values: object) -> tuple[int, ...] | None:
    shape = getattr(values, "shape", None)
    return None if shape is None else tuple(shape)
