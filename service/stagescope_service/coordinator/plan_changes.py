"""Changes of the plan: agreements on captures, and their ends.

Every rank learns of a change after its commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from stagescope_service.background import BackgroundTasks
from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.core.captures.active_plan import CaptureEntry
from stagescope_service.core.captures.agreement import ASKED
from stagescope_service.core.captures.requests import CaptureRequests
from stagescope_service.core.instructions import DumpReported, Instruction, Put
from stagescope_service.store.contract import RefusedWrite

_CHECK_SECONDS: Final = 0.02


class PlanChanges:
    """Commits changes of the plan, then publishes them.

    Args:
        runner: carries out instructions.
        commits: lets waiting calls know.
        requests: the active capture requests.
        clock: the service's clock.
    """

    def __init__(
        self, runner: Runner, commits: Commits, requests: CaptureRequests, clock: Clock
    ) -> None:
        self.plan = requests.plan
        self._runner = runner
        self._commits = commits
        self._requests = requests
        self._wall, self._mono = clock
        self._tasks = BackgroundTasks()
        self._check: asyncio.Task[None] | None = None

    async def carry_out(self, instructions: Sequence[Instruction]) -> Sequence[RefusedWrite]:
        """Carry out instructions, and change the plan by the reported states of dumps."""
        mono, wall = self._mono(), self._wall()
        changes = [
            put
            for each in instructions
            if type(each) is DumpReported
            for put in self._requests.reported(each.row, mono, wall)
        ]
        # A step that a rank missed may be agreed on again: then every rank must learn of it. Both
        # in one commit, because in between the capture would have ended as partial.
        return await self._commit(instructions, changes)

    def check_soon(self) -> None:
        """Check the requests in a moment, once for all who ask until then."""
        # If a thousand ranks acknowledge at once, each would have every request checked.
        if self.plan.entries and (self._check is None or self._check.done()):
            self._check = self._tasks.start(self._check_later())

    async def _check_later(self) -> None:
        await asyncio.sleep(_CHECK_SECONDS)
        await self.check()

    async def check(self) -> None:
        """Agree on the capture requests that ranks acknowledged, and end those that are done."""
        if self.plan.entries:
            await self.change(self._requests.check(self._mono(), self._wall()))

    async def change(self, rows: Sequence[Put]) -> None:
        """Commit changes of the plan, then let every rank know."""
        if rows:
            await self._commit((), rows)

    async def _commit(
        self, instructions: Sequence[Instruction], rows: Sequence[Put]
    ) -> Sequence[RefusedWrite]:
        publication = self.plan.publication() if rows else None
        refused = await self._runner.carry_out([*instructions, *rows])
        if publication is not None:
            self.plan.publish(publication)
            self._commits.notify_all()
        return refused

    async def agreed(self, capture_id: str, wait: float) -> CaptureEntry | None:
        """Wait until a capture is agreed on or refused, at most `wait` seconds; None: it ended."""
        deadline = self._mono() + wait
        while (entry := self.plan.entries.get(capture_id)) is not None:
            left = deadline - self._mono()
            if entry.agreement.phase != ASKED or left <= 0:
                break
            await self._commits.wait([f"capture/{capture_id}"], left)
        return entry
