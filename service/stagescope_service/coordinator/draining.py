"""Waits until all payloads of a run are read, and requests an attempt's processes to leave."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import math
import uuid
from collections import Counter
from typing import Final

from stagescope_service.coordinator.answers import Drained
from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.load import Load
from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.core import departures
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.hangs.stack_requests import RankRequest
from stagescope_service.core.instructions import Instruction
from stagescope_service.store.catalogue import Catalogue
from stagescope_wire.errors import CatalogueUnavailable, NotReady
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.schema import FINISH

_LEAVE_SECONDS: Final = 10.0
"""Seconds without contact until a process that was requested to leave counts as gone."""
_CUT_OFF: Final = "its process ended with the driver"
_ENDED: Final = "its process ended without a report"
_MAX_NAMED: Final = 20
_NOT_ARRIVED: Final = ("event", "payload", "scalar")
"""Kinds of lost data that a process had handed over."""


@dataclasses.dataclass(slots=True)
class _Request:
    """A request to a process: send all it has, and finish."""

    request_id: str
    since: float
    is_handed_out: bool = False


class Draining:
    """Drains runs; used from one event loop.

    Args:
        runner: carries out instructions.
        commits: wakes the calls that wait for payloads.
        catalogue: knows the lost data.
        load: how much longer than usual processes wait.
        clock: the service's clock.
    """

    def __init__(
        self, runner: Runner, commits: Commits, catalogue: Catalogue, load: Load, clock: Clock
    ) -> None:
        self._runner = runner
        self._commits = commits
        self._state = commits.state
        self._catalogue = catalogue
        self._load = load
        self._wall, self._mono = clock
        self._requests: dict[str, _Request] = {}

    async def drain(
        self,
        run: str | None,
        timeout: float,
        attempt_key: str | None = None,
        ended_by: JsonObject | None = None,
    ) -> Drained:
        """Wait until no payload of a run, or of any run (None), is pending.

        With an attempt key, the training of that start is over. Each of its processes is requested
        to leave, and does so once it has sent everything. `ended_by` describes the exception that
        ended its driver, as the fields of a FINISH do. Then no process outlives this call.
        """
        deadline = self._mono() + timeout
        missing: list[str] = []
        if attempt_key is not None:
            missing = await self._leave(run, attempt_key, deadline, ended_by)
        while pending := self._state.pending(run):
            left = deadline - self._mono()
            if left <= 0:
                break
            await self._commits.wait(pending[0].incarnation, min(left, 0.5))
        registry = self._state.registry
        known = registry.is_known(run)
        if run is None and attempt_key is not None:
            known = bool(registry.of_key(None, attempt_key))
        answer: Drained = {
            "run": run,
            "drained": not pending and not missing and (known or attempt_key is None),
            "pending": len(pending),
            "known": known,
            "missing": missing,
        }
        if lost := await self._lost(run, attempt_key):
            answer["lost"] = lost
        return answer

    async def _lost(self, run: str | None, attempt_key: str | None) -> list[str]:
        """Return the lost data of a start; without a key, the run's newest attempt.

        Raises:
            NotReady: the catalogue cannot be read now.
        """
        registry = self._state.registry
        newest = None if run is None else registry.newest(run)
        attempts = [newest] if newest is not None else []
        if attempt_key is not None:
            attempts = registry.of_key(run, attempt_key)
        if not attempts:
            return []
        ids = [attempt.attempt_id for attempt in attempts]
        counts: Counter[tuple[str | None, int | None, str]] = Counter()
        read = functools.partial(self._catalogue.loss_outlines, attempt_id=ids, kind=_NOT_ARRIVED)
        try:
            rows = await asyncio.to_thread(read)
        except CatalogueUnavailable as error:
            raise NotReady(str(error), advice="make the same call again") from error
        for row in rows:
            counts[row["role"], row["rank"], row["kind"]] += row["count"] or 1
        named = sorted(counts.items(), key=str)[:_MAX_NAMED]
        return [f"{role} rank {rank}: {kind}s {count}" for (role, rank, kind), count in named]

    async def _leave(
        self, run: str | None, attempt_key: str, deadline: float, ended_by: JsonObject | None
    ) -> list[str]:
        """Request the processes of a start to leave; return those that did not, or are missing."""
        unknown_until = min(deadline, self._mono() + _LEAVE_SECONDS)
        if ended_by is not None:
            unknown_until = -math.inf  # a driver that ends does not wait for what may never come
            wall = self._wall()
            await self._runner.carry_out(self._state.driver_ended(run, attempt_key, ended_by, wall))
        for incarnation in [*self._requests]:
            process = self._state.registry.processes.get(incarnation)
            if process is None or not process.live:
                del self._requests[incarnation]
        while True:
            attempts = self._state.registry.of_key(run, attempt_key)
            present = self._request_all(attempts)
            named = itertools.chain.from_iterable(each.missing() for each in attempts)
            missing = [*itertools.islice(named, _MAX_NAMED)]
            waited = [each for each in present if not self._does_not_answer(each)]
            left = (deadline if attempts else unknown_until) - self._mono()
            may_come = ended_by is None and any(not spoke for _, _, spoke in missing)
            # A named run may belong to another job: then no process is requested to leave.
            nobody = not attempts and run is not None and self._state.registry.is_known(run)
            if left <= 0 or nobody or (attempts and not waited and not may_come):
                break
            name = waited[0].incarnation if waited else attempt_key
            await self._commits.wait([name], min(left, 0.2))
        out: list[Instruction] = []
        for process in present:
            is_cut_off = ended_by is not None and process.live
            if is_cut_off or self._does_not_answer(process):
                # The driver that calls this has ended the run, if it had not ended before.
                wall, why = self._wall(), _CUT_OFF if is_cut_off else _ENDED
                out += departures.leave(self._state.registry, process, wall, finished=True, why=why)
                process.finish_seq = process.begun_seq
                self._requests.pop(process.incarnation, None)
        await self._runner.carry_out(out)
        ranks = dict.fromkeys((role, rank) for role, rank, _ in missing)
        ranks |= dict.fromkeys((process.role, process.rank) for process in present)
        return [f"{role} rank {rank}" for role, rank in ranks][:_MAX_NAMED]

    def _request_all(self, attempts: list[Attempt]) -> list[Process]:
        """Request the live processes with a probe to leave, each once; return them."""
        present = [
            process
            for attempt in attempts
            for process in attempt.processes.values()
            if process.live and not process.raw
        ]
        for process in present:
            if process.incarnation not in self._requests:
                self._requests[process.incarnation] = _Request(uuid.uuid4().hex, self._mono())
                self._commits.notify([process.incarnation])
        return present

    def _does_not_answer(self, process: Process) -> bool:
        """Return whether a process ended silently: Ray ends actors with their last handle."""
        request = self._requests.get(process.incarnation)
        patience = _LEAVE_SECONDS + self._load.pause
        quiet = self._wall() - process.last_contact > patience
        return quiet and request is not None and self._mono() - request.since > patience

    # --- polls ------------------------------------------------------------------------------
    def has_news(self, incarnation: str) -> bool:
        """Return whether a process has a request to leave that no poll has returned yet."""
        request = self._requests.get(incarnation)
        return request is not None and not request.is_handed_out

    def hand_out(self, incarnation: str) -> list[RankRequest]:
        """Return the request to leave, for a poll's answer."""
        request = self._requests.get(incarnation)
        if request is None:
            return []
        request.is_handed_out = True
        return [{"what": FINISH, "request_id": request.request_id}]

    def finished(self, incarnation: str) -> None:
        """Record that a process has left."""
        self._requests.pop(incarnation, None)
