"""The two log-prob streams that meet in the loss, gathered over a mini-batch."""

from __future__ import annotations

from typing import Any

import torch


class Meeting:
    """What the loss of a mini-batch's micro-batches had in hand."""

    def __init__(self) -> None:
        self._tensors: list[dict[str, torch.Tensor]] = []
        self._ids: list[str] | None = []

    def add(self, tensors: dict[str, torch.Tensor], ids: list[str] | None) -> None:
        """Take a micro-batch: tensors [rows, tokens] on the model's device, ids of the rows."""
        self._tensors.append(tensors)
        if ids is None or self._ids is None:
            self._ids = None
        else:
            self._ids += ids

    def take(self) -> dict[str, Any]:
        """Return what was added as one packed payload, and begin anew."""
        tensors, self._tensors = self._tensors, []
        ids, self._ids = self._ids, []
        if not tensors:
            return {}
        # Packed: a copy to the host for each name, and not for each row or micro-batch.
        lengths = [width for item in tensors for width in _widths(item["response_mask"])]
        ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        names = set.intersection(*(set(item) for item in tensors))
        packed: dict[str, Any] = {
            name: torch.cat([item[name].reshape(-1) for item in tensors]) for name in sorted(names)
        }
        return {**packed, "cu_seqlens": ends, "sample_ids": ids or None}


def _widths(tensor: torch.Tensor) -> list[int]:
    rows, width = tensor.shape
    return [int(width)] * int(rows)
