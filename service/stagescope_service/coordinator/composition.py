"""Builds the parts of a coordinator and connects them: the only place that knows all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from stagescope_service.coordinator.aggregation.aggregator import Aggregator
from stagescope_service.coordinator.aggregation.step_work import StepWork
from stagescope_service.coordinator.canary import CanaryJudge
from stagescope_service.coordinator.captures import CaptureCommands
from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.death_watch import DeathWatch
from stagescope_service.coordinator.deletion import RunChanges
from stagescope_service.coordinator.draining import Draining
from stagescope_service.coordinator.hangs.watch import HangWatch
from stagescope_service.coordinator.intake import Intake
from stagescope_service.coordinator.leases import Leases
from stagescope_service.coordinator.load import Load
from stagescope_service.coordinator.node_jobs import NodeJobs
from stagescope_service.coordinator.node_watch import NodeWatch
from stagescope_service.coordinator.payload_reading import PayloadReading
from stagescope_service.coordinator.plan_changes import PlanChanges
from stagescope_service.coordinator.raw_calls import RawCalls
from stagescope_service.coordinator.retention import Limits, Retention
from stagescope_service.coordinator.rules.actions import TriggerActions
from stagescope_service.coordinator.rules.watch import TriggerWatch
from stagescope_service.coordinator.rules.webhooks import Webhooks
from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.coordinator.version_checks import Order, VersionChecks
from stagescope_service.coordinator.weights import WeightComparer
from stagescope_service.core.captures.active_plan import Plan
from stagescope_service.core.captures.requests import CaptureRequests
from stagescope_service.core.hangs.detection import StuckRules
from stagescope_service.core.instructions import (
    Aggregate,
    BuildOperatorTable,
    CompareWeights,
    Ingest,
    Instruction,
    JudgeCanary,
    NonFiniteScalars,
    ReadWatchdogs,
    Rejudge,
)
from stagescope_service.core.state import State
from stagescope_service.ingest.ingestors import IngestorClient
from stagescope_service.service_file import page_address
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Snapshot, Store


class Parts:
    """The parts of a coordinator, connected.

    Args:
        settings: the service's settings.
        store: the open catalogue.
        ingestors: the ingestors of all nodes.
        state: the known state of earlier attempts.
        plan: the active captures.
        name: the name of this incarnation of the coordinator.
        clock: the service's clock.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        ingestors: IngestorClient,
        state: State,
        plan: Plan,
        *,
        name: str,
        clock: Clock,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.state = state
        self.plan = plan
        self._deleting: list[str] = []
        self.ingestors = ingestors
        self.catalogue = catalogue = Catalogue(settings.catalogue_url)
        self.commits = commits = Commits(state, store)
        self.runner = runner = Runner(commits, clock)
        self.load = Load(state, relay_ranks=settings.relay_ranks)
        stuck = StuckRules(min_seconds=settings.stuck_seconds, factor=settings.stuck_factor)
        self.hangs = HangWatch(state, stuck, late_seconds=1.5 * settings.poll_seconds)
        limits = Limits(
            settings.kept_bytes, settings.kept_days, settings.kept_steps, settings.keep_row_steps
        )
        self.retention = Retention(catalogue, ingestors, runner.write, limits)
        aggregator = Aggregator(catalogue, ingestors, runner.write)
        self.payloads = PayloadReading(
            runner, state, catalogue, plan, ingestors, self.retention, aggregator, clock
        )
        self.requests = CaptureRequests(plan, state)
        self.draining = Draining(runner, commits, catalogue, self.load, clock)
        self.plan_changes = PlanChanges(runner, commits, self.requests, clock)
        page = functools.partial(page_address, settings)
        self.intake = Intake(
            runner, commits, self.payloads, self.plan_changes, self.load, self.draining, clock,
            coordinator=name, poll_seconds=settings.poll_seconds, page=page,
        )  # fmt: skip
        self.leases = Leases(
            runner, commits, self.plan_changes, self.load, self.hangs, NodeWatch(state),
            DeathWatch(runner, state, ingestors, catalogue, clock), ingestors.lost_nodes, clock,
        )  # fmt: skip
        self.raw_calls = RawCalls(
            runner, commits, self.payloads, clock, poll_seconds=settings.poll_seconds
        )
        self.captures = CaptureCommands(
            settings, catalogue, commits, self.requests, self.plan_changes, clock
        )
        acting = TriggerActions(
            catalogue,
            self.retention.pin,
            self.captures.add_for_trigger,
            Webhooks(hosts=settings.webhook_hosts),
            page=page,
        )
        self.triggers = triggers = TriggerWatch(
            catalogue, runner.write, acting, webhook_hosts=settings.webhook_hosts
        )
        self.runs = RunChanges(
            settings, catalogue, ingestors, commits, self.requests, self.plan_changes,
            self.retention, triggers, clock,
        )  # fmt: skip
        self.steps = StepWork(
            runner, state, catalogue, aggregator, triggers, settings.keep_steps, clock
        )
        self.weights = WeightComparer(catalogue, runner.write, settings.weight_names)
        self.canary = CanaryJudge(catalogue, runner.write)
        node_jobs = NodeJobs(runner, ingestors, self.hangs, clock)
        runner.on(Ingest, self.payloads.start)
        runner.on(Aggregate, self.steps.aggregate)
        runner.on(Rejudge, self.steps.judge_again)
        runner.on(BuildOperatorTable, node_jobs.start_building)
        runner.on(ReadWatchdogs, node_jobs.start_reading)
        runner.on(CompareWeights, functools.partial(self._check, self.weights))
        runner.on(JudgeCanary, functools.partial(self._check, self.canary))
        runner.on(NonFiniteScalars, lambda each: runner.run(triggers.warn_non_finite(each)))

    def _check(self, checks: VersionChecks[Order], order: Order) -> None:
        if checks.takes(order):
            self.runner.run(checks.carry_out(order))

    def adopt(self, snapshot: Snapshot) -> None:
        """Take over the findings and requests for stacks that an earlier coordinator made."""
        self._deleting = [row["run"] for row in snapshot.runs if row["deleting_wall"] is not None]
        self.state.deleting |= {*self._deleting}
        self.state.refusals.adopt(snapshot.findings)
        self.hangs.adopt(snapshot.findings)
        self.load.adopt(snapshot.findings)
        self.retention.adopt_findings(snapshot.findings)
        self.state.stack_requests.adopt(snapshot.asked_stacks)

    def begin(self, left_over: Iterable[Instruction] = ()) -> None:
        """Begin with the stored rules of triggers, and with work that an earlier coordinator left.

        Steps that are aggregated before the rules are read wait for them.
        """
        left_over = list(left_over)
        self.steps.adopt(each for each in left_over if isinstance(each, Aggregate))
        for instruction in left_over:
            self.runner.start(instruction)
        self.runner.run(self.triggers.open(self.settings.triggers))
        self.runner.run(self.weights.catch_up())
        self.runner.run(self.canary.catch_up())
        self.runs.resume(self._deleting)
        self.payloads.adopt_files(self.ingestors.home)
        self.leases.begin()
