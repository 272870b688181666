"""One step, distributed over ranks and parts in any way: what is recorded, and what it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.batches import wire

from stagescope_service.dumps.records import DumpContents, DumpEntry, Location
from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire.schema import Part
from stagescope_wire.tensorfile import Array


def ragged(rows: Sequence[Array]) -> WireTensor:
    return wire(np.concatenate(rows), [0, *np.cumsum([*map(len, rows)]).tolist()])


def record(
    tensors: Mapping[str, WireTensor],
    *,
    stage: str | None = "actor_compute_log_prob",
    role: str | None = "actor",
    rank: int | None = 0,
    part: Part = Part(),  # noqa: B008
    step: int = 5,
    samples: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    **more: Any,
) -> DumpContents:
    """A record at a place; its path is its name."""
    section = more.pop("section", "other")
    name = f"{stage or section}-{role}-{rank}-{part}-{step}"
    about = more.pop("about", {"wall": 0.0})
    entry = DumpEntry(section, Location(step, stage, role, rank, part), Path(name), 1, name)
    return DumpContents(
        entry,
        dict(tensors),
        samples=None if samples is None else tuple(samples),
        groups=None if groups is None else tuple(groups),
        mask="response_mask" if "response_mask" in tensors else None,
        about=about,
        **more,
    )


class WholeStep:
    """Rows of a step with lengths of their own, padded on the right."""

    def __init__(self, lengths: Sequence[int]) -> None:
        generator = np.random.default_rng(0)
        rows, width = len(lengths), max(lengths)
        self.lengths = np.array(lengths, np.int64)
        self.there = np.arange(width) < self.lengths[:, None]
        mask = generator.integers(0, 2, (rows, width))
        mask[:, 0] = mask[np.arange(rows), self.lengths - 1] = 1
        self.samples = [f"g{row // 2}_{row % 2}" for row in range(rows)]
        self.groups = [f"g{row // 2}" for row in range(rows)]
        responses = generator.integers(1, 99, (rows, width))
        log_probs = -generator.random((rows, width)).astype(np.float32)
        bits = (log_probs.view(np.uint32) >> 16).astype(np.uint16)
        self.tensors: dict[str, WireTensor] = {
            "responses": wire(np.where(self.there, responses, 7)),
            "response_mask": wire(np.where(self.there, mask, 0)),
            "rollout_log_probs": wire(np.where(self.there, log_probs, 0).astype(np.float32)),
            "old_log_probs": wire(np.where(self.there, bits, 0).astype(np.uint16)),
            "rewards": wire(generator.random(rows).astype(np.float32)),
        }

    def piece(
        self, rows: Sequence[int], names: Sequence[str] | None = None
    ) -> dict[str, WireTensor]:
        """Some rows, no wider than the longest of them."""
        index = np.asarray(rows)
        width = int(self.lengths[index].max())
        found = {}
        for name in names or self.tensors:
            values = self.tensors[name][2]
            cut = values[index] if values.ndim == 1 else values[index, :width]
            found[name] = wire(np.ascontiguousarray(cut))
        return found

    def ids(self, rows: Sequence[int]) -> dict[str, Any]:
        return {
            "samples": [self.samples[row] for row in rows],
            "groups": [self.groups[row] for row in rows],
        }
