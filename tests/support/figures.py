"""A run with something to see in every figure, and a page that shows figures."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from tests.support.api import Rank, Service

from stagescope_service.compare.report.html import PageFigures, as_page

LOG_PROB = "actor_compute_log_prob"
UPDATE = "actor_update"


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
) -> dict[str, Any]:
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
    tensors = {
        "old_log_probs": ("float32", p.shape, p, None),
        "rollout_log_probs": ("float32", q.shape, q, None),
        "response_mask": ("int64", mask.shape, mask, None),
    }
    if floor is not None:
        again = (p + random.normal(0.0, floor, p.shape)).astype(np.float32)
        tensors["recomputed_log_probs"] = ("float32", p.shape, again, None)
    meta: dict[str, Any] = {}
    if versions is not None:
        own = np.repeat(np.array(versions, np.int64)[:, None], width, axis=1)
        tensors["versions"] = ("int64", own.shape, own, None)
        meta["policy_version"] = version
    ids = [f"sample-{first_sample + row}" for row in range(rows)]
    return {"schema": 1, "tensors": tensors, "strings": {"sample_ids": ids}, "meta": meta}


def layout(rank: int, tp: int, dp: int) -> dict[str, Any]:
    """The place of a rank: tp inner, dp outer."""
    return {
        "tp_rank": rank % tp, "tp_size": tp, "dp_rank": rank // tp, "dp_size": dp,
        "host": f"node-{rank // 8}",
    }  # fmt: skip


def train(
    live: Service,
    steps: range,
    *,
    key: str = "a1",
    start: float = 1_000.0,
    ranks: int = 8,
    run: str = "r",
    **hello: Any,
) -> list[Rank]:
    """Train on ranks of tp 1: the mismatch rises with the round, and in rank 5 from step 12 on."""
    every = [
        Rank(live, rank=rank, run=run, key=key, start=start, world_size=ranks,
             layout=layout(rank, 1, ranks), **hello)
        for rank in range(ranks)
    ]  # fmt: skip
    for step in steps:
        for at, rank in enumerate(every):
            rank.clock = start + 20.0 * (step - steps[0])
            train_step(rank, at, step)
    return every


def train_step(rank: Rank, at: int, step: int) -> None:
    """Go through the stages of a step, rank 3 more slowly than the others."""
    scale = 1.0 + (4.0 if at == 5 and step >= 12 else 0.0)
    noise = [scale * 0.01 * (1 + index) for index in range(4)]
    rank.stage("rollout_generate", step, seconds=4.0 + 0.1 * at)
    handed = rounds_payload(
        2, 4, 24, seed=100 * step + at, first_sample=2 * at, noise=noise, floor=0.002,
        versions=[step, step - 1], version=step,
    )  # fmt: skip
    if step == 9:
        handed["tensors"]["old_log_probs"][2][0, 3] = math.nan
    rank.stage(LOG_PROB, step, None if step == 6 else handed, seconds=2.0)
    loss = math.inf if step == 8 else 1.0 / step
    slow = 2.5 if at == 3 else 0.0
    rank.stage(UPDATE, step, seconds=3.0 + slow, scalars={"loss": loss, "reward": step / 20})
    if step % 2 == 0:
        rank.stage("weight_sync", step, seconds=0.5)


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
    return as_page("figures", "\n".join(body), figures)
