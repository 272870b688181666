"""Triggers on the live service: the rules in force are evaluated for each step summary.

A firing is written with its finding before its actions are taken. The actions (pins, a webhook, a
capture) are taken once for each rule and step, even if the step is aggregated again or the
coordinator restarts in between. No Ray in here: an `IngestorClient` reaches the ingestors.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import functools
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope.wire.errors import CatalogueUnavailable, InvalidPlan, NotFound, StagescopeError
from stagescope.wire.names import closest_by_words
from stagescope.wire.nonfinite import Json, JsonObject
from stagescope_service.coordinator.firings import Act, FiringKey, finding_of, finding_of_firing
from stagescope_service.coordinator.retries import retried
from stagescope_service.coordinator.trigger_actions import Acting, WebhookTest
from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.findings import NON_FINITE_SCALARS
from stagescope_service.core.instructions import Delete, NonFiniteScalars, Put
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import WriteRows
from stagescope_service.store.tables import FiringRow, TriggerRulesRow
from stagescope_service.store.tables.findings import FiringColumns
from stagescope_service.triggers.conditions import HISTORY
from stagescope_service.triggers.facts import Facts
from stagescope_service.triggers.names import NONFINITE_SCALAR, scalar_of
from stagescope_service.triggers.replay import Fired, StepReader
from stagescope_service.triggers.rules import Rule, Rules, defaults, read_yaml
from stagescope_service.triggers.series import NAMED, pack, unpack
from stagescope_service.triggers.watch import (
    REACH,
    At,
    Firing,
    FiringChanges,
    FiringRecord,
    RuleWatch,
)


class StepOrdering:
    """Aggregated steps of each attempt that wait for earlier ones.

    Args:
        most: steps of an attempt that may wait; beyond, the lowest are released.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[int, list[int]] = {}

    def aggregated(self, attempt_id: int, step: int, owed: Iterable[int]) -> list[int]:
        """Add an aggregated step; return the steps whose turn it is, in order.

        Args:
            attempt_id: of the step.
            step: that was aggregated.
            owed: steps of the attempt that are still to be aggregated; each ends in such a call.
        """
        waiting = self._waiting.setdefault(attempt_id, [])
        at = bisect.bisect_left(waiting, step)
        if waiting[at : at + 1] != [step]:
            waiting.insert(at, step)
        first = min(owed, default=None)
        count = len(waiting) if first is None else bisect.bisect_right(waiting, first)
        count = max(count, len(waiting) - self._most)
        due, left = waiting[:count], waiting[count:]
        if left:
            self._waiting[attempt_id] = left
        else:
            del self._waiting[attempt_id]
        return due


logger = logging.getLogger(__name__)

RUNS_FOLLOWED: Final = 8
"""Runs whose steps are kept in memory; others are read from the catalogue."""
DEFAULTS: Final = "defaults"
SET: Final = "set"
_ALL: Final = 1_000_000
_PAUSE: Final = 1.0


class TriggerWatch:
    """The rules in force, and their state; used from one event loop.

    Args:
        catalogue: the store's reading side.
        write: commits rows.
        acting: takes the actions of firings.
        webhook_hosts: that rules may call; empty: any.
        wall: Unix seconds of the service.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        write: WriteRows,
        acting: Acting,
        *,
        webhook_hosts: Collection[str] = (),
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._catalogue = catalogue
        self._write = write
        self._acting = acting
        self._webhook_hosts = webhook_hosts
        self._wall = wall
        self._rules = Rules(())
        self.revision = 0
        self._since = Since()
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        self._non_finite: OrderedDict[int, set[str]] = OrderedDict()
        """Attempt -> its scalars that a finding reports as not finite."""
        self._waiting: dict[int, list[int]] = {}
        """Attempt whose steps are being evaluated -> its next ones."""
        self._reading_found = asyncio.Lock()
        self._lock = asyncio.Lock()

    # --- rules ----------------------------------------------------------------------------
    async def open(self, file: Path | None = None) -> None:
        """Continue with the rules that were set last; `file` is in force until others are set.

        A file is read again if its content has changed. A file that cannot be read changes
        nothing, and makes an audit entry.
        """
        async with self._lock:  # steps that are aggregated meanwhile wait
            row = await self._stored()
            if row is not None:
                self.revision, self._since = row["revision"], Since.parse(row["since"])
                self._rules = _readable(row["document"])
            if file is not None:
                await self._adopt_file(file, row)
            # A newer version may have other defaults; rules that a user set stay.
            stored = None if row is None or self.revision != row["revision"] else row["source"]
            outdated = stored == DEFAULTS and self._rules != defaults()
            if not self.revision or outdated:
                await self._put(defaults(), by="stagescope", source=DEFAULTS)

    async def _stored(self) -> TriggerRulesRow | None:
        while True:
            try:
                return await asyncio.to_thread(self._catalogue.trigger_rules)
            except CatalogueUnavailable:  # noqa: PERF203
                logger.warning("the rules of triggers cannot be read yet", exc_info=True)
                await asyncio.sleep(_PAUSE)

    async def _adopt_file(self, file: Path, row: TriggerRulesRow | None) -> None:
        by = f"file {file}"
        try:
            text = await asyncio.to_thread(file.read_text, encoding="utf-8")
            known = None if row is None else row["digest"]
            if row_id(text) != known:
                await self._put(read_yaml(text), by=by, source=str(file), mark=row_id(text))
        except (OSError, UnicodeDecodeError, StagescopeError) as error:
            logger.warning("the rules in %s were not taken: %s", file, error)
            wall = self._wall()
            detail = {"problem": str(error)}
            refused = {"wall": wall, "by": by, "action": "triggers_refused", "detail": detail}
            await self._write([Put("audit", refused)])

    async def put(self, rules: Rules, *, by: str) -> int:
        """Put rules in force for every step that closes from now on; return their revision.

        Raises:
            InvalidPlan: a webhook is of a host that may not be called.
        """
        async with self._lock:
            return await self._put(rules, by=by, source=SET)

    async def _put(self, rules: Rules, *, by: str, source: str, mark: str = "") -> int:
        rules.check_hosts(self._webhook_hosts)
        wall, revision = self._wall(), self.revision + 1
        row = await asyncio.to_thread(self._catalogue.trigger_rules)
        since = await asyncio.to_thread(Since.now, self._catalogue)
        # A file that was overridden by a user stays overridden until its content changes.
        known = mark or (None if row is None else row["digest"]) or ""
        written: TriggerRulesRow = {
            "revision": revision,
            "wall": wall,
            "by": by,
            "source": source,
            "digest": known,
            "document": rules.wire(),
            "since": since.wire(),
        }
        shown = {"revision": revision, **rules.wire(secrets=False)}
        audit = {"wall": wall, "by": by, "action": "set_triggers", "detail": shown}
        await self._write([Put("trigger_rules", written), Put("audit", audit)])
        self._rules, self.revision, self._since = rules, revision, since
        self._followed.clear()
        return revision

    async def test_webhook(self, name: str) -> WebhookTest:
        """Send a test message to the webhook of a rule in force.

        Raises:
            NotFound: no rule in force is called so.
            InvalidInput: it has no webhook.
        """
        async with self._lock:  # until the stored rules are read
            rules = {rule.name: rule for rule in self._rules.rules}
        if name not in rules:
            meant = closest_by_words(name, rules)
            suggestion = "" if meant is None else f" (did you mean {meant}?)"
            raise NotFound(
                f"no rule in force is called {name!r:.100}{suggestion}",
                advice="`stagescope triggers` lists them",
            )
        return await self._acting.test_webhook(rules[name])

    # --- steps ----------------------------------------------------------------------------
    async def warn_non_finite(self, found: NonFiniteScalars) -> None:
        """Write the finding of a scalar that is not finite for the first time in its attempt.

        Rules on it are held against its step when that closes; a training that asserts on a NaN
        ends before. Never raises.
        """
        async with self._reading_found:  # in the order of arrival: the first occurrence is reported
            if found.attempt_id not in self._non_finite:
                before = await asyncio.to_thread(self._found_before, found.attempt_id)
                self._non_finite[found.attempt_id] = before
        known = self._non_finite[found.attempt_id]
        while len(self._non_finite) > RUNS_FOLLOWED:
            self._non_finite.popitem(last=False)
        if not found.names - known or not any(map(_finds_non_finite, self._rules.rules)):
            return
        known |= found.names
        try:
            await self._write([found.finding])
        except StagescopeError:
            logger.exception("a finding of %s was not written", sorted(found.names)[:20])

    def _found_before(self, attempt_id: int) -> set[str]:
        """Return the scalars of an attempt that an earlier coordinator found to be not finite."""
        try:
            rows = self._catalogue.firings(attempt_id=attempt_id, limit=_ALL)
        except StagescopeError:
            logger.exception("the firings of attempt %s cannot be read", attempt_id)
            return set()
        fired = (series for row in rows for series in _series_state(row).series or ())
        return set(filter(None, (scalar_of(series.metric) for series in fired)))

    async def aggregated(self, attempt_id: int, step: int) -> None:
        """Evaluate the rules for a step that was aggregated (again); never raises.

        Steps of an attempt that come while others of it are evaluated wait, and are then evaluated
        together: with a transaction for each, a service under load never caught up.
        """
        if (waiting := self._waiting.get(attempt_id)) is not None:
            waiting.append(step)
            return
        self._waiting[attempt_id] = due = [step]
        acting: set[asyncio.Task[None]] = set()
        while due:
            steps = due[:REACH]  # as many as are found again where this fails
            del due[:REACH]
            acts, rules = await self._hold(attempt_id, steps)
            # What a webhook or a node takes its time for delays no other step.
            for _, of_step in itertools.groupby(acts, lambda act: act.row["step"]):
                task = asyncio.get_running_loop().create_task(self._act([*of_step], rules))
                acting.add(task)
                task.add_done_callback(acting.discard)
        del self._waiting[attempt_id]
        await asyncio.gather(*acting)

    async def _act(self, acts: Sequence[Act], rules: Rules) -> None:
        """Take the actions of a step's firings; never raises."""
        try:
            for act in acts:
                await self._write(await self._acting.carry_out(act, rules))
        except Exception:
            # The next step that loads this run takes those that are still owed.
            self._followed.clear()
            logger.exception("the actions of %s failed", [act.key for act in acts])

    async def _hold(self, attempt_id: int, steps: Sequence[int]) -> tuple[list[Act], Rules]:
        """Write the changes of steps; return the actions to take, and the rules; never raises."""
        what = f"holding the rules against steps {steps} of attempt {attempt_id}"
        try:
            return await retried(functools.partial(self._try, attempt_id, steps), what)
        except Exception:
            # The next step that loads this run finds the firings of these again.
            self._followed.clear()
            logger.exception("%s failed", what)
            return [], self._rules

    async def _try(self, attempt_id: int, steps: Sequence[int]) -> tuple[list[Act], Rules]:
        async with self._lock:
            rules = self._rules
            try:
                acts, rows = await asyncio.to_thread(self._evaluate, rules, attempt_id, steps)
                if rows:
                    await self._write(rows)
            except Exception:
                self._followed.clear()  # it may hold half of the steps' changes
                raise
        return acts, rules

    def _evaluate(
        self, rules: Rules, attempt_id: int, steps: Sequence[int]
    ) -> tuple[list[Act], list[Put | Delete]]:
        attempt = self._catalogue.attempt(attempt_id)
        if attempt is None or not rules.rules:
            return [], []
        run = attempt["run"]
        acts: list[Act] = []
        rows: list[Put | Delete] = []
        followed = self._followed.get(run)
        if followed is None:
            due = (attempt_id, steps[0])
            followed = _Followed(self._catalogue, run, rules, self._since, due)
            self._followed[run] = followed
            acts += followed.owed
            while len(self._followed) > RUNS_FOLLOWED:
                self._followed.popitem(last=False)
        self._followed.move_to_end(run)
        for step in steps:
            for changes in followed.evaluate(attempt_id, step):
                self._change(followed, changes, acts, rows)
        followed.forget()
        return acts, rows

    def _change(
        self, followed: _Followed, changes: FiringChanges, acts: list[Act], rows: list[Put | Delete]
    ) -> None:
        """Collect the rows and actions of a step's changes."""
        for firing in changes.fired:
            fired = followed.explain(firing)
            if fired is None:
                continue
            act = Act(fired.rule, self._row(fired))
            key = (act.rule.name, firing.at)
            taken: dict[str, Json] = {}
            if key in followed.acted:
                pass  # it names more series than before: its actions were taken
            elif firing.cools_since is None:
                taken = {"actions": None, "acted_wall": None}
                followed.acted.add(key)
                acts.append(act)
            else:
                since = {"cools_since": firing.cools_since.step}
                taken = {"actions": since if act.rule.actions.costs else {}}
                taken["acted_wall"] = self._wall()
            rows += [Put("firings", {**act.row, **taken}), *finding_of(act)]
            if _finds_non_finite(act.rule):
                # What was known while the step was open; the rule's finding names every rank.
                place = {"attempt_id": act.row["attempt_id"], "step": act.row["step"]}
                rows.append(Delete("findings", {"kind": NON_FINITE_SCALARS, **place}))
        for rule, at in changes.withdrawn:
            key_row: FiringKey = {
                "attempt_id": followed.ids[at.attempt],
                "step": at.step,
                "rule": rule,
            }
            rows.append(Put("firings", {**key_row, "withdrawn_wall": self._wall()}))
            rows.append(Delete("findings", {"finding_id": finding_of_firing(key_row)}))

    def _row(self, fired: Fired) -> FiringColumns:
        finding = fired.evidence
        evidence = {**finding.evidence(), "ranks": [list(each) for each in finding.ranks]}
        hits = (*fired.firing.hits, *fired.firing.lasting)
        evidence[NAMED] = pack(hit.series for hit in hits)
        return {
            "attempt_id": fired.facts.attempt_id,
            "step": fired.facts.step,
            "rule": fired.rule.name,
            "run": fired.facts.run,
            "revision": self.revision,
            "stage": finding.stage,
            "role": finding.role,
            "rank": finding.rank,
            "round": finding.round,
            "message": finding.message,
            "evidence": {**evidence, "attempt": fired.facts.attempt},
            "wall": self._wall(),
            "withdrawn_wall": None,
        }


def _finds_non_finite(rule: Rule) -> bool:
    """Return whether a rule makes findings of scalars that are not finite."""
    return rule.metric.startswith(NONFINITE_SCALAR) and rule.actions.severity is not None


@dataclasses.dataclass(frozen=True)
class Since:
    """The steps that were closed when the rules were set: they fire nothing.

    Identified by number, since the clocks of trainings differ from the service's.
    """

    attempt_id: int = 0
    """The highest attempt at that time."""
    closed: Mapping[int, int | None] = dataclasses.field(default_factory=dict)
    """Live attempt -> its last closed step, None if it had none."""

    @classmethod
    def now(cls, catalogue: Catalogue) -> Since:
        """Return the steps that are closed now."""
        attempts = catalogue.attempts()
        live = {
            row["attempt_id"]: row["last_closed_step"]
            for row in attempts
            if row["ended_wall"] is None
        }
        return cls(max((row["attempt_id"] for row in attempts), default=0), live)

    @classmethod
    def parse(cls, fields: JsonObject) -> Since:
        """Read the result of `wire`."""
        return cls(fields["attempt_id"], {int(key): step for key, step in fields["closed"].items()})

    def wire(self) -> JsonObject:
        """Return built-in types."""
        closed = {str(attempt_id): step for attempt_id, step in self.closed.items()}
        return {"attempt_id": self.attempt_id, "closed": closed}

    def admits(self, attempt_id: int, step: int) -> bool:
        """Return whether a step closed afterwards."""
        if attempt_id not in self.closed:
            return attempt_id > self.attempt_id
        last = self.closed[attempt_id]
        return last is None or step > last


class _Followed:
    """A run whose steps are in memory.

    Args:
        catalogue, run, rules, since: what is evaluated.
        due: (attempt id, step) of the step whose turn it is.
    """

    def __init__(
        self, catalogue: Catalogue, run: str, rules: Rules, since: Since, due: tuple[int, int]
    ) -> None:
        self._since = since
        self._reader = StepReader(catalogue, run, rules)
        self.ids = {r["number"]: r["attempt_id"] for r in catalogue.attempts(run)}
        numbers = {attempt_id: number for number, attempt_id in self.ids.items()}
        known = [r for r in catalogue.firings(run=run, limit=_ALL) if r["attempt_id"] in numbers]
        by_name = {rule.name: rule for rule in rules.rules}
        self.acted = {
            (row["rule"], At(numbers[row["attempt_id"]], row["step"]))
            for row in known
            if _acted(row)
        }
        """Firings of steps that may be evaluated again whose actions were or will be taken."""
        in_force = [row for row in known if row["withdrawn_wall"] is None]
        self.owed = [
            Act(by_name[row["rule"]], row)
            for row in in_force
            if row["acted_wall"] is None and row["rule"] in by_name
        ]
        """Firings whose coordinator ended before all their actions were taken."""
        fired = {
            (row["rule"], At(numbers[row["attempt_id"]], row["step"])): _series_state(row)
            for row in in_force
        }
        self._watch = RuleWatch(rules.rules, fired=fired)

        self._ahead = self._load(due)

    def _load(self, due: tuple[int, int]) -> deque[At]:
        """Read the run's newest steps; return those to evaluate, in order.

        Each waits for its turn: a stored step may still lack a payload. The steps after `due`
        were never evaluated, however many were stored while it waited; of those before it, a
        coordinator that ended may have left the last `REACH`.
        """
        places = self._reader.steps(HISTORY + REACH)
        turn = places.index(due) if due in places else 0
        begin = max(turn - REACH, 0)
        for attempt_id, step in places[:begin]:
            facts = self._reader.facts(attempt_id, step)
            if facts is not None:
                at = At(facts.attempt, step)
                self._watch.remember(at, self._reader.values(facts))
        numbers = {attempt_id: number for number, attempt_id in self.ids.items()}
        ahead = places[begin:]
        return deque(sorted(At(numbers[attempt_id], step) for attempt_id, step in ahead))

    def evaluate(self, attempt_id: int, step: int) -> Iterator[FiringChanges]:
        """Evaluate a step whose turn it is, after the stored steps before it; yield the changes."""
        facts = self._reader.facts(attempt_id, step)
        if facts is None:
            return
        self.ids[facts.attempt] = attempt_id
        at = At(facts.attempt, step)
        while self._ahead and self._ahead[0] <= at:
            earlier = self._ahead.popleft()
            before = self._reader.facts(self.ids[earlier.attempt], earlier.step)
            if before is not None and earlier != at:
                yield self._changes_of(before)
        yield self._changes_of(facts)

    def _changes_of(self, facts: Facts) -> FiringChanges:
        fires = self._since.admits(facts.attempt_id, facts.step)
        at = At(facts.attempt, facts.step)
        return self._watch.evaluate(at, self._reader.values(facts), fires=fires)

    def forget(self) -> None:
        """Drop what is known of the firings of steps that are never evaluated again."""
        oldest = self._watch.reach
        if oldest is not None:
            self.acted = {(rule, at) for rule, at in self.acted if at >= oldest}

    def explain(self, firing: Firing) -> Fired | None:
        """Describe a firing; None if its step is gone."""
        facts = self._reader.facts(self.ids[firing.at.attempt], firing.at.step)
        return None if facts is None else self._reader.explain(firing, facts)


def _series_state(row: FiringRow) -> FiringRecord:
    evidence = row["evidence"]
    named = evidence.get(NAMED)  # None in rows of an earlier version
    series = None if named is None else unpack(named)
    return FiringRecord(series, acts=evidence.get("cools_since") is None)


def _acted(row: FiringRow) -> bool:
    """Return whether the actions of a stored firing were or will be taken."""
    return _series_state(row).acts or bool((row["actions"] or {}).keys() - {"cools_since"})


def _readable(document: Json) -> Rules:
    """Read stored rules; return the defaults if they are of another version and cannot be read."""
    try:
        return Rules.parse(document)
    except InvalidPlan:
        logger.exception("the stored rules cannot be read: the defaults are in force")
        return defaults()
