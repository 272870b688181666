"""Aggregates steps; ingestors join and recompute payloads where needed.

No Ray in here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from stagescope_service.coordinator.aggregation import assembly
from stagescope_service.coordinator.aggregation.assembly import StepParts
from stagescope_service.coordinator.aggregation.stream_changes import stream_changes
from stagescope_service.core.findings import finding
from stagescope_service.core.instructions import (
    Aggregate,
    Delete,
    IngestJob,
    PayloadJob,
    PayloadKey,
    Put,
    StepJob,
)
from stagescope_service.ingest.ingestors import IngestorClient
from stagescope_service.ingest.recompute import Source
from stagescope_service.statistics import Recompute
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import WriteRows
from stagescope_service.store.parts import part_key
from stagescope_service.store.queries.rollouts import TRAINER_STAGES, side_by_side
from stagescope_service.store.tables import PayloadRow, ProcessColumns, SampleRow
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render import ranks_text
from stagescope_wire.tensors import STREAM_TENSORS

NOT_KEPT: Final = "a payload that the ring no longer holds"


_ALL: Final = 1_000_000
_TRAINED: Final = (STREAM_TENSORS["old"], STREAM_TENSORS["current"])
_ROLLOUT: Final = STREAM_TENSORS["rollout"]


class JoinJob(NamedTuple):
    """Join this payload, which lies in the ring of this node."""

    key: PayloadKey
    node_id: str | None
    job: PayloadJob


@dataclasses.dataclass(frozen=True)
class JoinPlan:
    """The payloads to join in a step, and the samples that its trainer consumed."""

    step: int
    stage: str
    jobs: tuple[JoinJob, ...]
    sources: tuple[Source, ...]
    consumed: tuple[Put, ...]
    samples: tuple[str, ...]
    """Samples of the step, if no source is known."""
    consumed_steps: Mapping[tuple[str, int], int | None]
    """Source -> the step that consumed it, if known."""

    def used(self, ages: Collection[tuple[int, int]]) -> list[Put]:
        """Return rows that mark the payloads of these ages as consumed by this step."""
        rows = []
        for source in self.sources:
            before = self.consumed_steps[source.incarnation, source.seq]
            if source.age in ages and (before is None or before > self.step):
                key = {"incarnation": source.incarnation, "seq": source.seq}
                rows.append(Put("payloads", {**key, "consumed_step": self.step}))
        return rows


def plan_join(
    catalogue: Catalogue, run: str, step_parts: StepParts, again: Collection[PayloadKey] = ()
) -> JoinPlan | None:
    """Return what to join in a step; None if no stream is missing and no sample was consumed.

    Args:
        catalogue: lists payloads and samples.
        run: the run.
        step_parts: the step's present parts.
        again: payloads with rows without a rollout.
    """
    attempt_id, step = step_parts.attempt_id, step_parts.step
    stage, lacking = _lacking(catalogue, step_parts, again)
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
        jobs=tuple(_join_job(row, processes.get(row["incarnation"]), run) for row in lacking),
        sources=tuple(sources),
        consumed=tuple(consumed),
        samples=samples,
        consumed_steps=steps,
    )


def _lacking(
    catalogue: Catalogue, step_parts: StepParts, again: Collection[PayloadKey]
) -> tuple[str, Sequence[PayloadRow]]:
    """Return the summary's stage, and its payloads without the rollout's stream."""
    measured: dict[str, set[str]] = {}
    for part in step_parts.parts:
        if part.summary.pair[1] == "rollout":
            measured.setdefault(part.stage, set()).add(part.key)
    replaced = catalogue.replaced(step_parts.attempt_id, step_parts.step)
    in_summary = [stage for stage in TRAINER_STAGES if stage in measured]
    for stage in in_summary[:1] or TRAINER_STAGES:
        done = measured.get(stage, set())
        payloads = catalogue.payloads(
            step_parts.attempt_id, step_parts.step, stage=stage, state="ingested", limit=_ALL
        )
        lacking = [
            row
            for row in payloads
            if _is_alone(row["tensors"] or {})
            and _key(row) not in replaced
            and (part_key(*_key(row)) not in done or _key(row) in again)
        ]
        if lacking:
            return stage, lacking
    return TRAINER_STAGES[0], ()


def _is_alone(tensors: Collection[str]) -> bool:
    trained = any(name in tensors for name in _TRAINED)
    return trained and "response_mask" in tensors and _ROLLOUT not in tensors


def _join_job(row: PayloadRow, process: ProcessColumns | None, run: str) -> JoinJob:
    job: PayloadJob = {
        "run": run,
        "attempt_id": row["attempt_id"],
        "step": row["step"],
        "policy_version": row["policy_version"],
        "stage": row["stage"],
        "role": row["role"],
        "rank": row["rank"],
        "occurrence": row["occurrence"],
        "epoch": row["epoch"],
        "minibatch": row["minibatch"],
        "microbatch": row["microbatch"],
        "data_rank": None if process is None else process["data_rank"],
        "cp_size": None if process is None else process["cp_size"],
    }
    return JoinJob(_key(row), row["node_id"], job)


def _source(row: PayloadRow, number: int) -> Source:
    version = row["policy_version"]
    age = (-1 if version is None else version, number)
    return Source(
        row["node_id"], row["incarnation"], row["seq"], row["attempt_id"], row["step"], age
    )


def _key(row: PayloadRow) -> PayloadKey:
    return PayloadKey(row["incarnation"], row["seq"])


def _sample_key(row: SampleRow) -> JsonObject:
    return {
        "attempt_id": row["attempt_id"],
        "clock": row["clock"],
        "sample_uid": row["sample_uid"],
    }


logger = logging.getLogger(__name__)

_REMEMBERED: Final = 64
"""Steps that may still wait for late rollouts."""
_LISTED: Final = 100
_NAMED: Final = 5
"""Sample ids listed in a message."""


class Aggregator:
    """Aggregates the steps of one coordinator; one call a step at a time."""

    def __init__(self, catalogue: Catalogue, ingestors: IngestorClient, write: WriteRows) -> None:
        self._catalogue = catalogue
        self._ingestors = ingestors
        self._write = write
        self._waiting: OrderedDict[Aggregate, _Waiting] = OrderedDict()
        self._changing = asyncio.Lock()
        """A step adds to the findings of changed streams that other steps wrote."""

    async def aggregate(self, instruction: Aggregate, run: str, *, forgotten: bool = False) -> None:
        """Aggregate a step and write it with its findings.

        If the state machine has `forgotten` the step, its verdict is corrected, too.
        """
        step_parts = await asyncio.to_thread(
            assembly.begin, self._catalogue, instruction.attempt_id, instruction.step
        )
        joined, unmatched = await self._join(instruction, run, step_parts)
        if joined:
            step_parts = await asyncio.to_thread(
                assembly.begin, self._catalogue, instruction.attempt_id, instruction.step
            )
        step_parts.unmatched = unmatched
        await self._recompute(step_parts)
        rows = await asyncio.to_thread(assembly.rows_of, step_parts, run)
        if forgotten:
            rows += await asyncio.to_thread(assembly.verdict, self._catalogue, step_parts)
        await self._write(rows)
        async with self._changing:
            changes = await asyncio.to_thread(
                stream_changes, self._catalogue, run, instruction.attempt_id, instruction.step
            )
            if changes:
                await self._write(changes)

    def arrived(self, job: IngestJob, rows: Sequence[Put]) -> list[Aggregate]:
        """Return the steps to aggregate again after a payload was read."""
        if job["stage"] in TRAINER_STAGES or not self._waiting:
            return []
        uids = {put.row["sample_uid"] for put in rows if put.table == "samples"}
        return [
            instruction
            for instruction, waiting in self._waiting.items()
            if waiting.run == job["run"] and not uids.isdisjoint(waiting.samples)
        ]

    async def _join(
        self, instruction: Aggregate, run: str, step_parts: assembly.StepParts
    ) -> tuple[bool, Counter[str]]:
        """Join the payloads whose rollouts are known.

        Returns:
            Whether a payload was joined; reason -> tokens of the payloads without any rollout.
        """
        waiting = self._waiting.pop(instruction, None)
        again = frozenset() if waiting is None else waiting.keys
        plan = await asyncio.to_thread(plan_join, self._catalogue, run, step_parts, again)
        unmatched = Counter[str]()
        if plan is None:
            return False, unmatched
        rows: list[Put | Delete] = list(plan.consumed)
        left_out: dict[str, list[str]] = {}
        ranks: set[tuple[str, int]] = set()
        keys: set[PayloadKey] = set()
        used: set[tuple[int, int]] = set()
        joined = False
        for item in plan.jobs if plan.sources else ():
            answer = await self._ingestors.join(item.node_id, item.key, item.job, plan.sources)
            if answer is None or answer["left_out"]:
                ranks.add((item.job["role"], item.job["rank"]))
            if answer is None:
                left_out.setdefault(NOT_KEPT, []).append("")
                continue
            rows += answer["rows"]
            joined = joined or bool(answer["rows"])
            unmatched.update(answer["tokens"])
            used.update(answer["used"])
            for why, samples in answer["left_out"].items():
                left_out.setdefault(why, []).extend(samples)
                keys.add(item.key)
        missing = {uid for samples in left_out.values() for uid in samples}
        if not plan.sources:
            keys, missing = {item.key for item in plan.jobs}, set(plan.samples)
        if keys:
            self._wait(instruction, _Waiting(run, frozenset(keys), frozenset(missing)))
        rows += plan.used(used)
        if plan.sources and plan.jobs:
            rows.append(_not_joined(instruction, run, plan.stage, left_out, ranks))
        if rows:
            await self._write(rows)
        return joined, unmatched

    def _wait(self, instruction: Aggregate, waiting: _Waiting) -> None:
        self._waiting[instruction] = waiting
        while len(self._waiting) > _REMEMBERED:
            self._waiting.popitem(last=False)

    async def _recompute(self, step_parts: assembly.StepParts) -> None:
        """Recompute the parts with tokens that count elsewhere, until every token counts once."""
        if not step_parts.to_recompute and not step_parts.ranks_to_recompute:
            return
        nodes = await asyncio.to_thread(assembly.nodes_of, self._catalogue, step_parts)
        for item in step_parts.ranks_to_recompute:
            summary = await self._recomputed(item, step_parts, nodes)
            step_parts.replace(item, summary, for_rank=True)
        # A part that cannot be recomputed leaves its tokens to others, which may then overlap.
        for _ in range(len(step_parts.parts) + 1):
            for item in step_parts.to_recompute:
                step_parts.replace(item, await self._recomputed(item, step_parts, nodes))
            await asyncio.to_thread(step_parts.assemble)
            if not step_parts.to_recompute:
                return

    async def _recomputed(
        self, item: Recompute, step_parts: assembly.StepParts, nodes: Mapping[str, str | None]
    ) -> bytes | None:
        key = step_parts.sources[item.key].key
        job: StepJob = {"attempt_id": step_parts.attempt_id, "step": step_parts.step}
        summary = step_parts.step_summary
        pair = summary.summary.pair if summary else ("old", "rollout")
        node_id = nodes.get(item.key)
        return await self._ingestors.recompute(node_id, key, job, pair, list(item.skips))


class _Waiting:
    """Payloads whose rollouts had not arrived when a step was aggregated."""

    def __init__(self, run: str, keys: frozenset[PayloadKey], samples: frozenset[str]) -> None:
        self.run, self.keys, self.samples = run, keys, samples


def _not_joined(
    instruction: Aggregate,
    run: str,
    stage: str,
    left_out: Mapping[str, Sequence[str]],
    ranks: Collection[tuple[str, int]],
) -> Put | Delete:
    """Return the finding of rows without a rollout, or the deletion of an earlier one.

    Args:
        instruction: names the attempt and step.
        run, stage: the run and stage of the payloads without it.
        left_out: reason -> sample ids, empty for a row without one.
        ranks: (role, rank) that recorded those rows.
    """
    reasons = {why: len(samples) for why, samples in sorted(left_out.items())}
    text = ", ".join(f"{count} for {why}" for why, count in reasons.items())
    uids = sorted({uid for each in left_out.values() for uid in each if uid})
    if uids:
        text += f"; such as {', '.join(repr(uid[:60]) for uid in uids[:_NAMED])}"
    if ranks:
        text += f" on {ranks_text(sorted(ranks))}"
    put = finding(
        "rollout_not_joined",
        f"{sum(reasons.values())} rows have no rollout log-probs beside the trainer's: {text}",
        run=run,
        attempt_id=instruction.attempt_id,
        step=instruction.step,
        stage=stage,
        wall=time.time(),
        severity="error",
        evidence={
            "reasons": reasons,
            "ranks": [list(each) for each in sorted(ranks)],
            "samples": {why: sorted(set(uids))[:_LISTED] for why, uids in left_out.items()},
        },
        advice="their tokens are missing from the step summary; hand over sample_ids, "
        "response_mask, responses and (for pieces of a sample) positions on both sides",
    )
    if reasons:
        return put
    return Delete("findings", {"finding_id": put.row["finding_id"]})
