"""Routes of a mixture of experts, healthy ones and with planted faults, and payloads of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stagescope_workers import routing
from stagescope_workers.device import PinnedPool
from stagescope_workers.probe.draft import Draft

Routes = npt.NDArray[np.int16]
Fault = Literal["none", "empty", "shifted", "swapped", "missing", "explain", "half shifted"]

EXPERTS, K = 16, 2


@dataclasses.dataclass(frozen=True)
class Routed:
    """Tensors of a step's rows. Routes are those of a prompt of two tokens and of the response,
    without its last token: `of_tokens` are those behind each log-prob."""

    rollout: Routes
    trainer: Routes
    mask: npt.NDArray[np.uint8]
    p: npt.NDArray[np.float32]
    q: npt.NDArray[np.float32]

    @property
    def of_tokens(self) -> tuple[Routes, Routes]:
        """The routes of rollout and trainer behind each log-prob."""
        return self.rollout[:, 1:], self.trainer[:, 1:]

    def tensors(self, rows: slice = slice(None)) -> dict[str, Any]:
        """What a trainer records of some rows."""
        return {
            "rollout_routed_experts": self.rollout[rows],
            "trainer_routed_experts": self.trainer[rows],
            "response_mask": self.mask[rows],
            "old_log_probs": self.p[rows],
            "rollout_log_probs": self.q[rows],
        }

    def of_rows(self, rows: list[int]) -> Routed:
        """The tensors of these rows, in this order."""
        return Routed(
            self.rollout[rows], self.trainer[rows], self.mask[rows], self.p[rows], self.q[rows]
        )

    def payload(
        self, rows: slice = slice(None), first_sample: int = 0, without: str | None = None
    ) -> Any:
        """What its probe sends; `without` is a side whose routes are not recorded."""
        given = {n: v for n, v in self.tensors(rows).items() if n != f"{without}_routed_experts"}
        recorded = {n: (v.dtype.name, v.shape, v, None) for n, v in given.items()}
        counts = routing.count(recorded)
        names = [f"g{at + first_sample}" for at in range(len(self.mask[rows]))]
        sent = {n: t for n, t in recorded.items() if not n.endswith("experts")} | counts
        return {"schema": 1, "tensors": sent, "strings": {"sample_ids": names}, "meta": {}}


def routed(
    fault: Fault = "none", *, rows: int = 8, tokens: int = 64, layers: int = 4, seed: int = 0,
    flips: float = 0.01, apart: float = 0.19, usual: float = 0.015,
) -> Routed:  # fmt: skip
    """Return routes that agree in all but `flips` of the choices; tokens with another expert have
    a mean |d| of `apart`, the others of `usual`."""
    rng = np.random.default_rng(seed)
    order = rng.random((rows, tokens + 1, layers, EXPERTS)).argsort(axis=-1)
    trainer = order[..., :K].astype(np.int16)
    rollout = trainer.copy()
    flipped = rng.random((rows, tokens + 1, layers)) < flips
    rollout[flipped, 0] = order[flipped, K]
    hit = flipped[:, 1:].any(axis=2)
    mask = np.ones((rows, tokens), np.uint8)
    mask[:, tokens // 2] = 0  # two rounds
    q = -3.0 - rng.exponential(1.0, (rows, tokens))
    d = np.where(hit, apart, usual) * rng.laplace(size=(rows, tokens))
    if fault == "empty":
        rollout[:, :, 1] = 0
    elif fault == "shifted":
        rollout[:, 1:] = rollout[:, :-1].copy()
    elif fault == "half shifted":
        rollout[: rows // 2, 1:] = rollout[: rows // 2, :-1].copy()
    elif fault == "swapped":
        rollout[:, :, [1, 2]] = rollout[:, :, [2, 1]]
    elif fault == "missing":
        rollout[: rows // 2] = 0
    p = np.minimum(q + d, -0.01)  # log-probs are below 0
    return Routed(rollout, trainer, mask, p.astype(np.float32), q.astype(np.float32))


def marked(lengths: Sequence[int]) -> list[Routes]:
    """Routes [tokens, 2, 2] of rows: each of the second layer's names its row, of the first its
    token."""
    rows = []
    for row, count in enumerate(lengths):
        own = np.full((count, 2, 2), 100, np.int16)
        own[:, 0, 0], own[:, 1, 0] = np.arange(count), row
        rows.append(own)
    return rows


def passes_of(recorded: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row, column, row of the pass, token of the pass) of a stage's worst tokens, whose
    recorded routes are `marked`."""
    draft = Draft(PinnedPool())
    assert [*draft.add(recorded)] == []
    assert draft.problems() == []
    sent = draft.finish()
    assert not sent["meta"].get("routes_refused"), sent["meta"]["routes_refused"]
    tensors = sent["tensors"]
    _, shape, _, offsets = tensors["response_mask"]
    if "cu_seqlens" in tensors:
        offsets = tensors["cu_seqlens"][2]
    if offsets is None:
        offsets = np.arange(shape[0] + 1) * shape[1]
    for at, (rollout, _) in zip(
        tensors["routing_worst_at"][2].tolist(), tensors["routing_worst"][2], strict=True
    ):
        row = int(np.searchsorted(offsets, at, "right")) - 1
        yield row, at - int(offsets[row]), int(rollout[1, 0]), int(rollout[0, 0])
