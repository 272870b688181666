"""A run with something to see in every figure, and a page that shows figures."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from markupsafe import Markup
from tests.support.api import Rank, Service
from tests.support.measure import Handed

from stagescope_service.compare.report.html import PageFigures, as_page
from stagescope_wire.tensorfile import WireTensor

LOG_PROB = "actor_compute_log_prob"
UPDATE = "actor_update"


def layout_of(figure: go.Figure) -> Any:  # plotly declares none of a layout's attributes
    """The layout of a figure."""
    return figure.layout


def y_axes_of(figure: go.Figure) -> Any:  # likewise
    """The y axes of a figure."""
    return figure.select_yaxes()


def rounds_payload(
    rows: int,
    rounds: int,
    length: int,
    *,
    seed: int,
    noise: float | Sequence[float] = 0.02,
    first_sample: int = 0,
    shift: float = 0.0,
    floor: float | None = None,
    versions: Sequence[int] | None = None,
    version: int | None = None,
) -> Handed:
    """A payload whose rows have `rounds` rounds of `length` tokens, apart by one token.

    Args:
        rows, rounds, length: its shape.
        seed: of its numbers.
        noise: standard deviation of p - q in nats, of each round or of all.
        first_sample: number of the first sample.
        shift: added to p.
        floor: deviation of a second pass of the trainer; None: there is none.
        versions: policy version of each row.
        version: the trainer's own.
    """
    random = np.random.default_rng(seed)
    width = rounds * (length + 1)
    deviations = np.repeat(np.broadcast_to(noise, rounds), length + 1)
    q = -0.02 - random.exponential(0.8, (rows, width)).astype(np.float32)
    p = q + shift + deviations * random.standard_t(4, q.shape)
    p = np.minimum(p, -1e-4).astype(np.float32)
    mask = np.ones((rows, width), np.int64)
    mask[:, length :: length + 1] = 0
    tensors: dict[str, WireTensor] = {
        "old_log_probs": ("float32", p.shape, p, None),
        "rollout_log_probs": ("float32", q.shape, q, None),
        "response_mask": ("int64", mask.shape, mask, None),
    }
    if floor is not None:
        again = (p + random.normal(0.0, floor, p.shape)).astype(np.float32)
        tensors["recomputed_log_probs"] = ("float32", p.shape, again, None)
    meta: dict[str, object] = {}
    if versions is not None:
        own = np.repeat(np.array(versions, np.int64)[:, None], width, axis=1)
        tensors["versions"] = ("int64", own.shape, own, None)
        meta["policy_version"] = version
    ids = [f"sample-{first_sample + row}" for row in range(rows)]
    return {"schema": 1, "tensors": tensors, "strings": {"sample_ids": ids}, "meta": meta}


def layout(rank: int, tp: int, dp: int) -> dict[str, object]:
    """The place of a rank: tp inner, dp outer."""
    return {
        "tp_rank": rank % tp, "tp_size": tp, "dp_rank": rank // tp, "dp_size": dp,
        "host": f"node-{rank // 8}",
    }  # fmt: skip


RANKS = 8
ROUNDS = 4
LENGTH = 24
"""Tokens of a round."""
ROWS = 2
"""Samples of a rank in a step: of staleness 0 and 1."""
UNMEASURED = 3
"""The step in which no rank hands over its streams."""
APART = 5
"""The rank that differs from the others, from step `APART_FROM` on."""
APART_FROM = 7
SLOW = 3
"""The rank that updates more slowly than the others."""
FLOOR = 0.002


def handed(at: int, step: int, attempt: int = 1) -> Handed:
    """What a rank hands over in a step: the mismatch rises with the round."""
    scale = 5.0 if at == APART and step >= APART_FROM else 1.0
    noise = [scale * 0.01 * (1 + index) for index in range(ROUNDS)]
    found = rounds_payload(
        ROWS, ROUNDS, LENGTH, seed=1000 * attempt + 100 * step + at, first_sample=ROWS * at,
        noise=noise, floor=FLOOR, versions=[step, step - 1], version=step,
    )  # fmt: skip
    found["strings"]["engine_ids"] = [f"replica {at % 2}"] * ROWS
    found["strings"]["prompt_hashes"] = [f"prompt {(ROWS * at + row + step) % 6}" for row in (0, 1)]
    if step == 2 and at == 0:  # a NaN under the mask
        found["tensors"]["old_log_probs"][2][0, 3] = math.nan
    return found


def train(
    live: Service, steps: range, *, attempt: int = 1, run: str = "r", **hello: Any
) -> list[Rank]:
    """Train on `RANKS` ranks; step 4 has an infinite loss, and even steps a weight sync."""
    start = 1000.0 * attempt
    every = [
        Rank(live, rank=rank, run=run, key=f"{run}-{attempt}", start=start, world_size=RANKS,
             layout=layout(rank, 1, RANKS), **hello)
        for rank in range(RANKS)
    ]  # fmt: skip
    for step in steps:
        for at, rank in enumerate(every):
            rank.clock = start + 20.0 * (step - steps[0])
            rank.stage("rollout_generate", step, seconds=4.0 + 0.1 * at)
            payload = None if step == UNMEASURED else handed(at, step, attempt)
            rank.stage(LOG_PROB, step, payload, seconds=2.0)
            scalars = {"loss": math.inf if step == 4 else 1.0 / step, "reward": step / 20}
            slow = 2.5 if at == SLOW else 0.0
            rank.stage(UPDATE, step, seconds=3.0 + slow, scalars=scalars)
            if step % 2 == 0:
                rank.stage("weight_sync", step, seconds=0.5)
    return every


@dataclasses.dataclass(frozen=True)
class Streams:
    """The tokens of payloads that count: under the mask, both values finite."""

    p: npt.NDArray[np.float64]
    q: npt.NDArray[np.float64]
    again: npt.NDArray[np.float64]
    round: npt.NDArray[np.int64]
    staleness: npt.NDArray[np.int64]

    @property
    def distance(self) -> npt.NDArray[np.float64]:
        """|p - q| of each token."""
        return np.abs(self.p - self.q)

    def where(self, chosen: npt.NDArray[np.bool_]) -> Streams:
        """Return some of the tokens."""
        return Streams(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))


def streams(step: int, attempt: int = 1, ranks: Sequence[int] = range(RANKS)) -> Streams:
    """Return the tokens of a step in plain numpy, as an independent reference."""
    columns: list[list[Any]] = [[], [], [], [], []]
    for at in ranks:
        tensors = handed(at, step, attempt)["tensors"]
        p, q, again = (
            tensors[name][2].astype(np.float64)
            for name in ("old_log_probs", "rollout_log_probs", "recomputed_log_probs")
        )
        place = np.broadcast_to(np.arange(p.shape[1]) // (LENGTH + 1), p.shape)
        stale = step - tensors["versions"][2]
        counts = (tensors["response_mask"][2] == 1) & np.isfinite(p) & np.isfinite(q)
        for column, values in zip(columns, (p, q, again, place, stale), strict=True):
            column.append(values[counts])
    return Streams(*(np.concatenate(column) for column in columns))


def page_of(answers: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a page that shows figures as `/figures/...` answers them, each below its title."""
    figures, body = PageFigures(), []
    for name, answer in answers.items():
        drawn = go.Figure(answer["figure"])
        drawn.update_layout(title={"text": answer["title"]})
        body.append(
            f'<section id="{name}">{figures.add(drawn)}'
            f"<p>{html.escape(answer['note'] or '')}</p></section>"
        )
    return as_page("figures", Markup("\n".join(body)), figures)
