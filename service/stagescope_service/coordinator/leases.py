"""Expires the leases of processes that stopped polling, and finds stuck ranks and lost nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.death_watch import DeathWatch
from stagescope_service.coordinator.hangs.watch import HangWatch
from stagescope_service.coordinator.load import Load
from stagescope_service.coordinator.node_watch import NodeWatch
from stagescope_service.coordinator.plan_changes import PlanChanges
from stagescope_service.coordinator.runner import Clock, Runner


class Leases:
    """The leases of all processes; used from one event loop.

    Args:
        runner: carries out instructions.
        commits: says whether the catalogue can be written.
        plan_changes: commits changes of the plan.
        load: says whether events arrive late.
        hangs: finds stuck ranks.
        nodes: finds lost nodes.
        deaths: finds processes that died on their own.
        lost_nodes: returns the nodes that the cluster lost, and why each.
        clock: the service's clock.
    """

    def __init__(
        self,
        runner: Runner,
        commits: Commits,
        plan_changes: PlanChanges,
        load: Load,
        hangs: HangWatch,
        nodes: NodeWatch,
        deaths: DeathWatch,
        lost_nodes: Callable[[], Mapping[str, str]],
        clock: Clock,
    ) -> None:
        self._runner = runner
        self._commits = commits
        self._state = commits.state
        self._plan_changes = plan_changes
        self._load = load
        self._hangs = hangs
        self._nodes = nodes
        self._deaths = deaths
        self._lost_nodes = lost_nodes
        self._wall, self._mono = clock
        self._last_expiry = self._mono()

    def begin(self) -> None:
        """Begin every lease now that calls can arrive: no poll could be received before."""
        self._last_expiry = self._mono()
        self._renew_all(self._last_expiry)

    async def expire(self) -> None:
        """Expire the leases of processes that do not poll; call it several times a lease.

        No poll can be received while the catalogue cannot be written, events arrive late, or this
        process is held up itself. Then every lease begins again, and no rank is stuck.
        """
        now, wall = self._mono(), self._wall()
        held_up = now - self._last_expiry > self._state.lease_seconds / 2
        self._last_expiry = now
        if not self._commits.store.health().healthy:
            self._renew_all(now)
            return
        await self._runner.carry_out(self._load.check(now, wall))
        if held_up or self._load.is_late(now):
            self._renew_all(now)
        else:
            lost = self._lost_nodes()
            await self._plan_changes.carry_out(self._state.expire(now, wall, lost))
            await self._plan_changes.carry_out(self._nodes.check(lost, wall))
            await self._plan_changes.carry_out(self._hangs.check(now, wall))
            self._deaths.check(wall)
        await self._plan_changes.check()

    def _renew_all(self, now: float) -> None:
        self._state.renew_all(now)
        self._state.registry.restarts.listening_since = self._wall()
