"""What tokens may do that see some runs only.

Routes get their data from `Dependencies`. A restricted token's have a catalogue in which other runs
do not exist, and commands that refuse what is about another run, or about all of them. Which routes
such a token may call at all is listed here: a route that is not is refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from fastapi import Request

from stagescope.wire.errors import Forbidden, NotFound
from stagescope.wire.framing import WirePayload
from stagescope.wire.links import Link
from stagescope.wire.schema import Sender
from stagescope_service.api.auth import caller_of
from stagescope_service.api.dependencies import Commands, Dependencies, Reply
from stagescope_service.api.prometheus import Counts
from stagescope_service.api.step_summaries import StepSummaries
from stagescope_service.api.target import Finder
from stagescope_service.api.token_file import RunPatterns, sees
from stagescope_service.store.catalogue import Catalogue

_MAX_KEPT: Final = 32
"""Sets of patterns whose dependencies are kept."""

ROUTES: Final = frozenset(
    line.strip()
    for line in """
    GET /whoami
    POST /login
    POST /logout
    GET /healthz
    GET /readyz
    GET /status
    GET /metrics
    GET /stream
    GET /runs
    GET /runs/{run}/attempts
    GET /runs/{run}/metrics
    GET /runs/{run}/diagnosis
    GET /runs/{run}/report
    GET /runs/{run}/bundle
    GET /exact
    GET /series
    GET /losses
    GET /losses/groups
    GET /findings
    GET /findings/groups
    GET /findings/{finding_id}
    GET /triggers/defaults
    GET /triggers/firings
    GET /triggers/firings/groups
    POST /triggers/test
    GET /plan
    GET /captures
    POST /captures
    GET /captures/{capture_id}
    DELETE /captures/{capture_id}
    GET /engines
    POST /engines
    GET /engines/{name}
    DELETE /engines/{name}
    GET /stacks
    POST /stacks
    GET /weights
    GET /weights/{version}
    GET /devices
    GET /diff
    POST /comparisons
    GET /comparisons/page
    POST /operators/divergence
    POST /operators/tensors
    GET /steps
    GET /steps/{step}/metrics
    GET /steps/{step}/rounds
    GET /steps/{step}/ranks
    GET /steps/{step}/tokens
    GET /steps/{step}/stages
    GET /steps/{step}/scalars
    GET /steps/{step}/dumps
    GET /steps/{step}/stuck
    GET /steps/{step}/stacks
    GET /steps/{step}/operators
    GET /steps/{step}/operators/stack
    GET /steps/{step}/operators/non-finite
    GET /steps/{step}/weights
    GET /steps/{step}/samples
    GET /steps/{step}/samples/{sample_uid}
    GET /steps/{step}/row
    GET /steps/{step}/loss
    GET /steps/{step}/batch
    GET /steps/{step}/kept
    PUT /steps/{step}/pin
    DELETE /steps/{step}/pin
    GET /steps/{step}/anatomy
    GET /steps/{step}/timeline
    GET /figures
    GET /figures/overview
    GET /figures/rounds
    GET /figures/rank-rounds
    GET /figures/rank-steps
    GET /figures/distribution
    GET /figures/density
    GET /figures/anatomy
    GET /figures/offenders
    GET /figures/timeline
    GET /figures/operators
    GET /figures/operator-divergence
    GET /figures/comparison
    POST /events
    POST /poll
    POST /drain
    """.strip().split("\n")
)
"""The routes whose answers are of one run, or leave out other runs. Not among them are the rules
of triggers, which are of all runs and name them, and the audit."""


async def check_route(request: Request) -> None:
    """Refuse a route to a token that sees some runs only, unless it is one of `ROUTES`.

    Raises:
        Forbidden: it is not.
    """
    if caller_of(request).runs is None:
        return
    route = f"{request.method} {request.scope['route'].path_format}"
    if route not in ROUTES:
        raise _forbidden(f"{request.method} {request.url.path:.200} is about every run")


class DependenciesOf:
    """The dependencies of callers by the runs that they may see; for one event loop."""

    def __init__(self, every: Dependencies) -> None:
        self._every = every
        self._kept: dict[RunPatterns, Dependencies] = {}

    def __call__(self, runs: RunPatterns | None) -> Dependencies:
        """Return those of a caller that may see `runs`; None: every run."""
        if runs is None:
            return self._every
        found = self._kept.pop(runs, None) or self._make(runs)
        self._kept[runs] = found
        if len(self._kept) > _MAX_KEPT:
            self._kept.pop(next(iter(self._kept))).catalogue.close()
        return found

    def _make(self, runs: RunPatterns) -> Dependencies:
        every = self._every
        catalogue = every.catalogue.of_runs(runs)
        commands = RestrictedCommands(every.commands, runs, catalogue, every.catalogue)
        # What is computed for one set of runs may name them: it is no answer for another.
        prefix = ("of runs", *runs)
        return dataclasses.replace(
            every,
            catalogue=catalogue,
            commands=commands,
            runs=runs,
            finder=Finder(catalogue),
            step_summaries=StepSummaries(catalogue, every.settings.cache_steps),
            computations=every.computations.apart(prefix),
            long_computations=every.long_computations.apart(prefix),
            counts=Counts(catalogue),
        )


class RestrictedCommands:
    """The coordinator's methods for a caller that may see some runs only.

    It does not inherit from `Commands`: a method that is not here does not pass by.
    """

    def __init__(
        self, commands: Commands, runs: RunPatterns, catalogue: Catalogue, every: Catalogue
    ) -> None:
        """Make them.

        Args:
            commands: of a caller that sees every run.
            runs: that are seen.
            catalogue: with these runs alone.
            every: the catalogue with every run.
        """
        self._commands = commands
        self._runs = runs
        self._catalogue = catalogue
        self._every = every

    # --- what trainings send ------------------------------------------------------------------
    async def record_events(
        self,
        *,
        sender: Sequence[object],
        events: Sequence[Sequence[object]],
        payloads: Mapping[int, WirePayload] | None = None,
    ) -> Reply:
        """Record a batch of one of the runs."""
        await self._check_sender(sender)
        return await self._commands.record_events(sender=sender, events=events, payloads=payloads)

    async def poll(
        self, *, sender: Sequence[object], revision: int, unreceipted: Sequence[int], wait: float
    ) -> Reply:
        """Renew the lease of a sender of one of the runs."""
        await self._check_sender(sender)
        return await self._commands.poll(
            sender=sender, revision=revision, unreceipted=unreceipted, wait=wait
        )

    async def drain(
        self, *, run: str | None, timeout: float, attempt_key: str | None = None
    ) -> Reply:
        """Wait for one of the runs; not for every run."""
        self._check_run(run)
        return await self._commands.drain(run=run, timeout=timeout, attempt_key=attempt_key)

    # --- captures -----------------------------------------------------------------------------
    async def plan(self) -> Reply:
        """Return the captures in force of the runs."""
        reply = await self._commands.plan()
        captures = [each for each in reply.get("captures") or () if sees(self._runs, each["run"])]
        return {**reply, "captures": captures} if "captures" in reply else reply

    async def add_capture(self, *, spec: Mapping[str, object], by: str, wait: float = 0.0) -> Reply:
        """Request a capture for one of the runs, in the service's own directory."""
        self._check_run(spec.get("run"))
        for name in ("data_dir", "config_path"):
            if spec.get(name) is not None:
                raise _forbidden(f"{name} may name files of every run")
        baseline = spec.get("bench")
        if isinstance(baseline, Mapping) and baseline.get("capture_id") is not None:
            await self._capture(str(baseline["capture_id"]))
        return await self._commands.add_capture(spec=spec, by=by, wait=wait)

    async def remove_capture(self, *, capture_id: str, by: str) -> Reply:
        """Withdraw a capture of one of the runs."""
        await self._capture(capture_id)
        return await self._commands.remove_capture(capture_id=capture_id, by=by)

    async def _capture(self, capture_id: str) -> None:
        if await asyncio.to_thread(self._catalogue.capture, capture_id) is None:
            raise NotFound(
                f"no capture {capture_id!r:.100}", see=(Link("captures", shows="all of them"),)
            )

    # --- what is of an attempt ----------------------------------------------------------------
    async def pin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Pin a step of one of the runs."""
        await self._check_attempt(attempt_id)
        return await self._commands.pin(attempt_id=attempt_id, step=step, by=by)

    async def unpin(self, *, attempt_id: int, step: int, by: str) -> Reply:
        """Unpin a step of one of the runs."""
        await self._check_attempt(attempt_id)
        return await self._commands.unpin(attempt_id=attempt_id, step=step, by=by)

    async def ask_stacks(
        self,
        *,
        attempt_id: int,
        role: str | None,
        ranks: Sequence[int] | None,
        seconds: float,
        by: str,
    ) -> Reply:
        """Request stacks of processes of one of the runs."""
        await self._check_attempt(attempt_id)
        return await self._commands.ask_stacks(
            attempt_id=attempt_id, role=role, ranks=ranks, seconds=seconds, by=by
        )

    def read_artifact(self, *, node_id: str, path: str, offset: int, size: int) -> bytes:
        """Return a part of a file that the restricted catalogue names."""
        return self._commands.read_artifact(node_id=node_id, path=path, offset=offset, size=size)

    # --- engines ------------------------------------------------------------------------------
    async def add_engine(self, *, engine: Mapping[str, object], by: str) -> Reply:
        """Register an engine of one of the runs; replace none of another."""
        self._check_run(engine.get("run"))
        await self._check_engine(str(engine["name"]))
        return await self._commands.add_engine(engine=engine, by=by)

    async def remove_engine(self, *, name: str, by: str) -> Reply:
        """Remove an engine of one of the runs."""
        await self._check_engine(name)
        return await self._commands.remove_engine(name=name, by=by)

    async def _check_engine(self, name: str) -> None:
        rows = await asyncio.to_thread(self._every.engines)
        if any(row["name"] == name and not sees(self._runs, row["run"]) for row in rows):
            raise _forbidden(f"the name {name!r:.100} is taken by an engine")

    # --- what is of every run -----------------------------------------------------------------
    async def set_triggers(self, *, document: Mapping[str, object], by: str) -> Reply:
        """Refuse: the rules are of every run."""
        raise _forbidden("the rules of triggers are of every run")

    async def test_webhook(self, *, rule: str, by: str) -> Reply:
        """Refuse: the rules are of every run."""
        raise _forbidden("the rules of triggers are of every run")

    async def note_bundle(
        self, *, run: str, attempt_id: int, step: int | None, message: str, path: str | None
    ) -> Reply:
        """Refuse: the service alone does this."""
        raise _forbidden("the service alone notes bundles")

    async def status(self) -> Reply:
        """Return the coordinator's state; why files are not kept may name other runs."""
        reply = await self._commands.status()
        keeping = reply.get("keeping")
        if isinstance(keeping, dict) and keeping.get("reason"):
            reply = {**reply, "keeping": {**keeping, "reason": "see it with a token of every run"}}
        return reply

    # --- checks -------------------------------------------------------------------------------
    def _check_run(self, run: object) -> None:
        if not isinstance(run, str) or not sees(self._runs, run):
            what = "every run" if run is None else f"run {run!r:.100}"
            raise _forbidden(f"this is about {what}", self._runs)

    async def _check_sender(self, sender: Sequence[object]) -> None:
        parsed = Sender.parse(sender)
        self._check_run(parsed.run)
        # A process may not be spoken for by the token of another run.
        runs = await asyncio.to_thread(self._every.runs_of_process, parsed.incarnation)
        if not all(sees(self._runs, run) for run in runs):
            raise _forbidden(f"process {parsed.incarnation!r:.100} is of another run", self._runs)

    async def _check_attempt(self, attempt_id: int) -> None:
        if await asyncio.to_thread(self._catalogue.attempt, attempt_id) is None:
            raise NotFound("there is no such attempt", see=(Link("runs"),))


def _forbidden(wrong: str, runs: RunPatterns | None = None) -> Forbidden:
    return Forbidden(
        f"{wrong}, and the token sees some runs only",
        expected=f"a run like {' or '.join(runs)}" if runs else "a token that sees every run",
    )
