"""Which payloads of a step lack the rollout's stream, and where it may lie. Rows in, orders out."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from stagescope.schema import STREAM_TENSORS
from stagescope_service.engine.ingestion.retake import Source
from stagescope_service.engine.instructions import PayloadKey, Put
from stagescope_service.engine.wholes.assembly import Forming
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.rollouts import TRAINER_STAGES, side_by_side

NOT_KEPT: Final = "a payload that the ring no longer holds"

Row = Mapping[str, Any]

_ALL: Final = 1_000_000
_TRAINED: Final = (STREAM_TENSORS["old"], STREAM_TENSORS["current"])
_ROLLOUT: Final = STREAM_TENSORS["rollout"]


class JoinOrder(NamedTuple):
    """Join this payload, which lies in the ring of this node."""

    key: PayloadKey
    node_id: str | None
    job: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class JoinPlan:
    """What to join in a step, and what its trainer consumed."""

    step: int
    stage: str
    orders: tuple[JoinOrder, ...]
    sources: tuple[Source, ...]
    consumed: tuple[Put, ...]
    samples: tuple[str, ...]
    """Samples of the step, where no source is known."""
    consumed_steps: Mapping[tuple[str, int], int | None]
    """Source -> the step that consumed it as far as is known."""

    def used(self, ages: Collection[tuple[int, int]]) -> list[Put]:
        """Note in the payloads of these ages that this step consumed them."""
        rows = []
        for source in self.sources:
            before = self.consumed_steps[source.incarnation, source.seq]
            if source.age in ages and (before is None or before > self.step):
                key = {"incarnation": source.incarnation, "seq": source.seq}
                rows.append(Put("payloads", {**key, "consumed_step": self.step}))
        return rows


def plan(
    catalogue: Catalogue, run: str, forming: Forming, again: Collection[PayloadKey] = ()
) -> JoinPlan | None:
    """Return what to join in a step, None where nothing is lacking and nothing was consumed.

    Args:
        catalogue: where payloads and samples are listed.
        run: the run.
        forming: the step's parts as they are.
        again: payloads of which some rows had no rollout.
    """
    attempt_id, step = forming.attempt_id, forming.step
    stage, lacking = _lacking(catalogue, forming, again)
    near = side_by_side(catalogue.attempts(run), attempt_id)
    found = catalogue.consumed(near, attempt_id, step)
    consumed = [
        Put("samples", {**_sample_key(row), "step": step, "consumed_step": step})
        for row in found
        if row["consumed_step"] is None or row["consumed_step"] > step
    ]
    if not lacking and not consumed:
        return None
    sources: list[Source] = []
    steps: dict[tuple[str, int], int | None] = {}
    if lacking:
        versions = {row["policy_version"] for row in found if row["clock"].startswith("v")}
        for number, row in enumerate(catalogue.rollout_payloads(near, step, versions)):
            if _ROLLOUT in (row["tensors"] or {}):
                sources.append(_source(row, number))
                steps[row["incarnation"], row["seq"]] = row["consumed_step"]
    samples: tuple[str, ...] = ()
    if lacking and not sources:
        rows = catalogue.samples(attempt_id, step, limit=_ALL)
        samples = tuple(row["sample_uid"] for row in rows)
    processes = {row["incarnation"]: row for row in catalogue.processes(attempt_id)}
    return JoinPlan(
        step=step,
        stage=stage,
        orders=tuple(_order(row, processes.get(row["incarnation"], {}), run) for row in lacking),
        sources=tuple(sources),
        consumed=tuple(consumed),
        samples=samples,
        consumed_steps=steps,
    )


def _lacking(
    catalogue: Catalogue, forming: Forming, again: Collection[PayloadKey]
) -> tuple[str, Sequence[Row]]:
    """Return the stage that the whole comes from, and its payloads without the rollout's stream."""
    measured: dict[str, set[str]] = {}
    for part in forming.parts:
        if part.summary.pair[1] == "rollout":
            measured.setdefault(part.stage, set()).add(part.key)
    replaced = catalogue.replaced(forming.attempt_id, forming.step)
    of_whole = [stage for stage in TRAINER_STAGES if stage in measured]
    for stage in of_whole[:1] or TRAINER_STAGES:
        done = measured.get(stage, set())
        payloads = catalogue.payloads(
            forming.attempt_id, forming.step, stage=stage, state="ingested", limit=_ALL
        )
        lacking = [
            row
            for row in payloads
            if _is_alone(row["tensors"] or {})
            and _key(row) not in replaced
            and (f"{row['incarnation']}:{row['seq']}" not in done or _key(row) in again)
        ]
        if lacking:
            return stage, lacking
    return TRAINER_STAGES[0], ()


def _is_alone(tensors: Mapping[str, Any]) -> bool:
    trained = any(name in tensors for name in _TRAINED)
    return trained and "response_mask" in tensors and _ROLLOUT not in tensors


def _order(row: Row, process: Row, run: str) -> JoinOrder:
    names = ("attempt_id", "step", "policy_version", "stage", "role", "rank")
    parts = ("occurrence", "epoch", "minibatch", "microbatch")
    job = {name: row[name] for name in (*names, *parts)}
    job |= {"run": run, "data_rank": process.get("data_rank"), "cp_size": process.get("cp_size")}
    return JoinOrder(_key(row), row["node_id"], job)


def _source(row: Row, number: int) -> Source:
    version = row["policy_version"]
    age = (-1 if version is None else int(version), number)
    return Source(
        row["node_id"], row["incarnation"], row["seq"], row["attempt_id"], row["step"], age
    )


def _key(row: Row) -> PayloadKey:
    return PayloadKey(row["incarnation"], row["seq"])


def _sample_key(row: Row) -> dict[str, Any]:
    return {name: row[name] for name in ("attempt_id", "clock", "sample_uid")}
