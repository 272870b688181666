"""Forming wholes with the help of ingestors: payloads are joined and taken again where needed.

No Ray in here: `Hands` reaches the ingestors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from stagescope_service.engine.findings import finding
from stagescope_service.engine.instructions import Assemble, Delete, PayloadKey, Put
from stagescope_service.engine.wholes import assembly as wholes
from stagescope_service.engine.wholes import joins
from stagescope_service.statistics import Restate
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.rollouts import TRAINER_STAGES
from stagescope_service.triggers.evidence import ranks_text

logger = logging.getLogger(__name__)

_REMEMBERED: Final = 64
"""Steps that may still wait for rollouts that come late."""
_LISTED: Final = 100
_NAMED: Final = 5
"""Sample ids that a message names."""

Write = Callable[[Sequence[Put | Delete]], Awaitable[None]]


class Hands(Protocol):
    """What ingestors do for the forming of a whole; None: the ring no longer holds it."""

    async def restate(
        self,
        node_id: str | None,
        key: PayloadKey,
        job: dict[str, Any],
        pair: tuple[str, str],
        skips: Sequence[tuple[int, int, int]],
    ) -> bytes | None:
        """Take a payload's statistics again without tokens that count elsewhere."""

    async def join(
        self,
        node_id: str | None,
        key: PayloadKey,
        job: dict[str, Any],
        sources: Sequence[tuple[Any, ...]],
    ) -> dict[str, Any] | None:
        """Join a trainer's payload with rollouts; see `Retake.join`."""


class Former:
    """Forms the wholes of one coordinator; one call a step at a time."""

    def __init__(self, catalogue: Catalogue, hands: Hands, write: Write) -> None:
        self._catalogue = catalogue
        self._hands = hands
        self._write = write
        self._waiting: OrderedDict[Assemble, _Waiting] = OrderedDict()

    async def form(self, order: Assemble, run: str, *, forgotten: bool = False) -> None:
        """Form a step's whole and write it with its findings.

        Where the state machine has `forgotten` the step, its verdict is corrected, too.
        """
        forming = await asyncio.to_thread(
            wholes.begin, self._catalogue, order.attempt_id, order.step
        )
        joined, alone = await self._join(order, run, forming)
        if joined:
            forming = await asyncio.to_thread(
                wholes.begin, self._catalogue, order.attempt_id, order.step
            )
        forming.alone = alone
        await self._restate(forming)
        rows = await asyncio.to_thread(wholes.rows_of, forming, run)
        if forgotten:
            rows += await asyncio.to_thread(wholes.verdict, self._catalogue, forming)
        await self._write(rows)

    def arrived(self, job: Mapping[str, Any], rows: Sequence[Put]) -> list[Assemble]:
        """Return the steps to form again now that a payload was read."""
        if job["stage"] in TRAINER_STAGES or not self._waiting:
            return []
        uids = {put.row["sample_uid"] for put in rows if put.table == "samples"}
        return [
            order
            for order, waiting in self._waiting.items()
            if waiting.run == job["run"] and not uids.isdisjoint(waiting.samples)
        ]

    async def _join(
        self, order: Assemble, run: str, forming: wholes.Forming
    ) -> tuple[bool, Counter[str]]:
        """Join what can be joined.

        Returns:
            Whether something was; of payloads that have no rollout at all, reason -> tokens.
        """
        waiting = self._waiting.pop(order, None)
        again = frozenset() if waiting is None else waiting.keys
        plan = await asyncio.to_thread(joins.plan, self._catalogue, run, forming, again)
        alone = Counter[str]()
        if plan is None:
            return False, alone
        rows: list[Put | Delete] = list(plan.consumed)
        left_out: dict[str, list[str]] = {}
        ranks: set[tuple[str, int]] = set()
        keys: set[PayloadKey] = set()
        used: set[tuple[int, int]] = set()
        joined = False
        sources = [tuple(source) for source in plan.sources]
        for item in plan.orders if sources else ():
            answer = await self._hands.join(item.node_id, item.key, dict(item.job), sources)
            if answer is None or answer["left_out"]:
                ranks.add((str(item.job["role"]), int(item.job["rank"])))
            if answer is None:
                left_out.setdefault(joins.NOT_KEPT, []).append("")
                continue
            rows += [Put(table, row) for table, row in answer["rows"]]
            joined = joined or bool(answer["rows"])
            alone.update(answer["tokens"])
            used |= {(int(a), int(b)) for a, b in answer["used"]}
            for why, samples in answer["left_out"].items():
                left_out.setdefault(why, []).extend(samples)
                keys.add(item.key)
        missing = {uid for samples in left_out.values() for uid in samples}
        if not sources:
            keys, missing = {item.key for item in plan.orders}, set(plan.samples)
        if keys:
            self._wait(order, _Waiting(run, frozenset(keys), frozenset(missing)))
        rows += plan.used(used)
        if sources and plan.orders:
            rows.append(_not_joined(order, run, plan.stage, left_out, ranks))
        if rows:
            await self._write(rows)
        return joined, alone

    def _wait(self, order: Assemble, waiting: _Waiting) -> None:
        self._waiting[order] = waiting
        while len(self._waiting) > _REMEMBERED:
            self._waiting.popitem(last=False)

    async def _restate(self, forming: wholes.Forming) -> None:
        """Take parts again of which some tokens count elsewhere, until every token counts once."""
        if not forming.restate and not forming.restate_ranks:
            return
        nodes = await asyncio.to_thread(wholes.nodes_of, self._catalogue, forming)
        for item in forming.restate_ranks:
            summary = await self._restated(item, forming, nodes)
            forming.replace(item, summary, for_rank=True)
        # A part that cannot be taken again may leave its tokens to others, which then overlap.
        for _ in range(len(forming.parts) + 1):
            for item in forming.restate:
                forming.replace(item, await self._restated(item, forming, nodes))
            await asyncio.to_thread(forming.assemble)
            if not forming.restate:
                return

    async def _restated(
        self, item: Restate, forming: wholes.Forming, nodes: Mapping[str, str | None]
    ) -> bytes | None:
        row = forming.rows[item.key]
        key = PayloadKey(row["incarnation"], row["seq"])
        job = {"attempt_id": forming.attempt_id, "step": forming.step}
        pair = forming.whole.summary.pair if forming.whole else ("old", "rollout")
        return await self._hands.restate(nodes.get(item.key), key, job, pair, list(item.skips))


class _Waiting:
    """Whose rollouts had not come when a step's whole was formed."""

    def __init__(self, run: str, keys: frozenset[PayloadKey], samples: frozenset[str]) -> None:
        self.run, self.keys, self.samples = run, keys, samples


def _not_joined(
    order: Assemble,
    run: str,
    stage: str,
    left_out: Mapping[str, Sequence[str]],
    ranks: Collection[tuple[str, int]],
) -> Put | Delete:
    """Say which rows of a step have no rollout, or take back that some had none.

    Args:
        order: of which attempt and step.
        run, stage: whose payloads lack it.
        left_out: reason -> sample ids, empty where a row has none.
        ranks: (role, rank) that handed those rows over.
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
        attempt_id=order.attempt_id,
        step=order.step,
        stage=stage,
        wall=time.time(),
        severity="error",
        evidence={
            "reasons": reasons,
            "ranks": [list(each) for each in sorted(ranks)],
            "samples": {why: sorted(set(uids))[:_LISTED] for why, uids in left_out.items()},
        },
        advice="their tokens are missing from the step's whole; hand over sample_ids, "
        "response_mask, responses and (for pieces of a sample) positions on both sides",
    )
    if reasons:
        return put
    return Delete("findings", {"finding_id": put.row["finding_id"]})
