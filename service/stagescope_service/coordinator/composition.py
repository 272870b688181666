"""Builds the parts of a coordinator and connects them: the only place that knows all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from stagescope_service.coordinator.aggregation.aggregator import Aggregator
from stagescope_service.coordinator.aggregation.step_work import StepWork
from stagescope_service.coordinator.capture_commands import CaptureCommands
from stagescope_service.coordinator.commits import Commits
from stagescope_service.coordinator.draining import Draining
from stagescope_service.coordinator.hang_watch import HangWatch
from stagescope_service.coordinator.intake import Intake
from stagescope_service.coordinator.load import Load
from stagescope_service.coordinator.node_jobs import NodeJobs
from stagescope_service.coordinator.node_watch import NodeWatch
from stagescope_service.coordinator.payload_reading import PayloadReading
from stagescope_service.coordinator.raw_calls import RawCalls
from stagescope_service.coordinator.retention import Limits, Retention
from stagescope_service.coordinator.runner import Clock, Runner
from stagescope_service.coordinator.trigger_actions import Acting
from stagescope_service.coordinator.trigger_watch import TriggerWatch
from stagescope_service.coordinator.webhooks import Webhooks
from stagescope_service.coordinator.weight_comparer import WeightComparer
from stagescope_service.core.captures.plan import Plan
from stagescope_service.core.captures.requests import CaptureRequests
from stagescope_service.core.hang_detection import StuckRules
from stagescope_service.core.instructions import (
    Aggregate,
    BuildOperatorTable,
    CompareWeights,
    Ingest,
    Instruction,
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


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a coordinator."""

    settings: Settings
    clock: Clock
    state: State
    plan: Plan
    catalogue: Catalogue
    ingestors: IngestorClient
    commits: Commits
    runner: Runner
    retention: Retention
    payloads: PayloadReading
    steps: StepWork
    weights: WeightComparer
    hangs: HangWatch
    load: Load
    triggers: TriggerWatch
    draining: Draining
    intake: Intake
    requests: CaptureRequests
    captures: CaptureCommands
    raw_calls: RawCalls

    def adopt(self, snapshot: Snapshot) -> None:
        """Take over the findings and requests for stacks that an earlier coordinator made."""
        self.state.refusals.adopt(snapshot.findings)
        self.hangs.adopt(snapshot.findings)
        self.load.adopt(snapshot.findings)
        self.retention.adopt_findings(snapshot.findings)
        self.state.stack_requests.adopt(snapshot.asked_stacks)

    def begin(self, left_over: Iterable[Instruction] = ()) -> None:
        """Begin with the stored rules of triggers, and with what an earlier coordinator left.

        Steps that are aggregated before the rules are read wait for them.
        """
        left_over = list(left_over)
        self.steps.adopt(each for each in left_over if isinstance(each, Aggregate))
        for instruction in left_over:
            self.runner.start(instruction)
        self.runner.run(self.triggers.open(self.settings.triggers))
        self.runner.run(self.weights.catch_up())
        self.payloads.adopt_files(self.ingestors.home)
        self.intake.begin()


def compose(
    settings: Settings,
    store: Store,
    ingestors: IngestorClient,
    state: State,
    plan: Plan,
    *,
    name: str,
    clock: Clock,
) -> Parts:
    """Return the parts of a coordinator, connected.

    Args:
        settings: of the service.
        store: the catalogue, open.
        ingestors: of all nodes.
        state: what is known of earlier attempts.
        plan: the active captures.
        name: of this incarnation of the coordinator.
        clock: of the service.
    """
    catalogue = Catalogue(settings.catalogue_url)
    commits = Commits(state, store)
    runner = Runner(commits, clock)
    load = Load(state, relay_ranks=settings.relay_ranks)
    rules = StuckRules(min_seconds=settings.stuck_seconds, factor=settings.stuck_factor)
    hangs = HangWatch(state, rules, late_seconds=1.5 * settings.poll_seconds)
    limits = Limits(
        settings.kept_bytes, settings.kept_days, settings.kept_steps, settings.keep_row_steps
    )
    retention = Retention(catalogue, ingestors, runner.write, limits)
    aggregator = Aggregator(catalogue, ingestors, runner.write)
    payloads = PayloadReading(
        runner, state, catalogue, plan, ingestors, retention, aggregator, clock
    )
    requests = CaptureRequests(plan, state)
    draining = Draining(runner, commits, catalogue, load, clock)
    intake = Intake(
        runner,
        commits,
        payloads,
        requests,
        load,
        draining,
        hangs,
        NodeWatch(state),
        ingestors.lost_nodes,
        clock,
        coordinator=name,
        poll_seconds=settings.poll_seconds,
    )
    captures = CaptureCommands(settings, catalogue, commits, requests, intake, clock)
    acting = Acting(
        catalogue,
        retention.pin,
        captures.add_for_trigger,
        Webhooks(hosts=settings.webhook_hosts),
        page=functools.partial(page_address, settings),
    )
    triggers = TriggerWatch(catalogue, runner.write, acting, webhook_hosts=settings.webhook_hosts)
    steps = StepWork(runner, state, catalogue, aggregator, triggers, settings.keep_steps, clock)
    weights = WeightComparer(catalogue, runner.write, settings.weight_names)
    node_jobs = NodeJobs(runner, ingestors, hangs, clock)

    def compare_weights(instruction: CompareWeights) -> None:
        if weights.takes(instruction):
            runner.run(weights.compare(instruction))

    def warn_non_finite(instruction: NonFiniteScalars) -> None:
        runner.run(triggers.warn_non_finite(instruction))

    runner.on(Ingest, payloads.start)
    runner.on(Aggregate, steps.aggregate)
    runner.on(Rejudge, steps.judge_again)
    runner.on(BuildOperatorTable, node_jobs.start_building)
    runner.on(ReadWatchdogs, node_jobs.start_reading)
    runner.on(CompareWeights, compare_weights)
    runner.on(NonFiniteScalars, warn_non_finite)
    raw_calls = RawCalls(runner, commits, payloads, clock, poll_seconds=settings.poll_seconds)
    return Parts(
        settings=settings,
        clock=clock,
        state=state,
        plan=plan,
        catalogue=catalogue,
        ingestors=ingestors,
        commits=commits,
        runner=runner,
        retention=retention,
        payloads=payloads,
        steps=steps,
        weights=weights,
        hangs=hangs,
        load=load,
        triggers=triggers,
        draining=draining,
        intake=intake,
        requests=requests,
        captures=captures,
        raw_calls=raw_calls,
    )
