"""Triggers on the live service: evaluates the active rules for each step summary.

A firing is written with its finding before its actions are taken. The actions (pins, a webhook, a
capture) are taken once for each rule and step, even if the step is aggregated again or the
coordinator restarts in between. No Ray in here: an `IngestorClient` reaches the ingestors.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from stagescope_service.background import BackgroundTasks
from stagescope_service.coordinator.answers import WebhookTest
from stagescope_service.coordinator.retries import retried
from stagescope_service.coordinator.rules.actions import TriggerActions
from stagescope_service.coordinator.rules.firings import (
    DueFiring,
    FiringKey,
    finding_of,
    finding_of_firing,
)
from stagescope_service.coordinator.rules.followed_run import FollowedRun, Since, series_state
from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.findings import NON_FINITE_SCALARS
from stagescope_service.core.instructions import Delete, NonFiniteScalars, Put
from stagescope_service.rules.document import Rule, Rules, defaults, read_yaml
from stagescope_service.rules.names import NONFINITE_SCALAR, scalar_of
from stagescope_service.rules.watch import REACH, FiringChanges
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import WriteRows
from stagescope_service.store.tables import TriggerRulesRow
from stagescope_wire.errors import InvalidPlan, NotFound, StagescopeError
from stagescope_wire.names import closest_by_words, is_experiment
from stagescope_wire.nonfinite import Json

logger = logging.getLogger(__name__)

RUNS_FOLLOWED: Final = 8
"""Runs whose steps are kept in memory; others are read from the catalogue."""
DEFAULTS: Final = "defaults"
SET: Final = "set"
_ALL: Final = 1_000_000
_PAUSE: Final = 1.0


class TriggerWatch:
    """The active rules, and their state; used from one event loop.

    Args:
        catalogue: the store's reading side.
        write: commits rows.
        acting: takes the actions of firings.
        webhook_hosts: the hosts that rules may call; empty: any.
        wall: Unix seconds of the service.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        write: WriteRows,
        acting: TriggerActions,
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
        self._followed: OrderedDict[str, FollowedRun] = OrderedDict()
        self._non_finite: OrderedDict[int, set[str]] = OrderedDict()
        """Attempt -> its scalars that a finding reports as not finite."""
        self._waiting: dict[int, list[int]] = {}
        """Attempt whose steps are being evaluated -> its next ones."""
        self._taken: set[tuple[int, int, str]] = set()
        """Firings whose actions are being taken: a run that is read again owes them, too."""
        self._reading_found = asyncio.Lock()
        self._lock = asyncio.Lock()

    # --- rules ----------------------------------------------------------------------------
    async def open(self, file: Path | None = None) -> None:
        """Continue with the rules that were set last; `file` is active until others are set.

        A file is read again if its content has changed. A file that cannot be read changes
        nothing, and makes an audit entry.
        """
        async with self._lock:  # steps that are aggregated meanwhile wait
            while True:  # without its rules a run would never have a finding
                try:
                    return await self._open(file)
                except Exception:  # noqa: PERF203
                    logger.warning("the rules of triggers cannot be read yet", exc_info=True)
                    await asyncio.sleep(_PAUSE)

    async def _open(self, file: Path | None) -> None:
        row = await asyncio.to_thread(self._catalogue.trigger_rules)
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
        """Activate rules for every step that closes from now on; return their revision.

        Raises:
            InvalidPlan: a webhook's host is not allowed, or a capture is wrong.
        """
        async with self._lock:
            return await self._put(rules, by=by, source=SET)

    async def _put(self, rules: Rules, *, by: str, source: str, mark: str = "") -> int:
        rules.check_hosts(self._webhook_hosts)
        rules.check_captures()
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
        """Send a test message to the webhook of an active rule.

        Raises:
            NotFound: no active rule has this name.
            InvalidInput: it has no webhook.
        """
        async with self._lock:  # until the stored rules are read
            rules = {rule.name: rule for rule in self._rules.rules}
        if name not in rules:
            meant = closest_by_words(name, rules)
            suggestion = "" if meant is None else f" (did you mean {meant}?)"
            raise NotFound(
                f"no active rule is called {name!r:.100}{suggestion}",
                advice="`stagescope triggers` lists them",
            )
        return await self._acting.test_webhook(rules[name])

    def forget(self, run: str) -> None:
        """Let go of a run that is deleted: another may begin under its name."""
        self._followed.pop(run, None)

    # --- steps ----------------------------------------------------------------------------
    async def warn_non_finite(self, found: NonFiniteScalars) -> None:
        """Write the finding of a scalar that is not finite for the first time in its attempt.

        Rules check its step only when it closes; a training that asserts on a NaN ends before.
        Never raises.
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
        fired = (series for row in rows for series in series_state(row).series)
        return set(filter(None, (scalar_of(series.metric) for series in fired)))

    async def aggregated(self, attempt_id: int, step: int) -> None:
        """Evaluate the rules for a step that was aggregated (again); never raises.

        Steps of an attempt that arrive while others of it are evaluated wait. They are evaluated
        together: with a transaction for each, a service under load never caught up.
        """
        if (waiting := self._waiting.get(attempt_id)) is not None:
            waiting.append(step)
            return
        self._waiting[attempt_id] = due = [step]
        acting = BackgroundTasks()
        while due:
            steps = due[:REACH]  # as many as are found again if this fails
            del due[:REACH]
            acts, rules = await self._evaluate_with_retries(attempt_id, steps)
            # A slow webhook or node delays no other step.
            self._taken |= {_id(due) for due in acts}
            for _, of_step in itertools.groupby(acts, lambda due: due.row["step"]):
                acting.start(self._act([*of_step], rules))
        del self._waiting[attempt_id]
        await acting.settled()

    async def _act(self, acts: Sequence[DueFiring], rules: Rules) -> None:
        """Take the actions of a step's firings; never raises."""
        try:
            for due in acts:
                await self._write(await self._acting.carry_out(due, rules))
        except Exception:
            # The next step that loads this run takes those that are still owed.
            self._followed.clear()
            logger.exception("the actions of %s failed", [due.key for due in acts])
        finally:
            self._taken -= {_id(due) for due in acts}

    async def _evaluate_with_retries(
        self, attempt_id: int, steps: Sequence[int]
    ) -> tuple[list[DueFiring], Rules]:
        """Write the changes of steps; return the actions to take, and the rules; never raises."""
        what = f"evaluating the rules for steps {steps} of attempt {attempt_id}"
        try:
            return await retried(
                functools.partial(self._evaluate_and_write, attempt_id, steps), what
            )
        except Exception:
            # The next step that loads this run finds the firings of these again.
            self._followed.clear()
            logger.exception("%s failed", what)
            return [], self._rules

    async def _evaluate_and_write(
        self, attempt_id: int, steps: Sequence[int]
    ) -> tuple[list[DueFiring], Rules]:
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
    ) -> tuple[list[DueFiring], list[Put | Delete]]:
        attempt = self._catalogue.attempt(attempt_id)
        if attempt is None or not rules.rules or is_experiment(attempt["run"]):
            return [], []
        run = attempt["run"]
        acts: list[DueFiring] = []
        rows: list[Put | Delete] = []
        followed = self._followed.get(run)
        if followed is None:
            due = (attempt_id, steps[0])
            followed = FollowedRun(self._catalogue, run, rules, self._since, due)
            self._followed[run] = followed
            acts += [each for each in followed.owed if _id(each) not in self._taken]
            while len(self._followed) > RUNS_FOLLOWED:
                self._followed.popitem(last=False)
        self._followed.move_to_end(run)
        for step in steps:
            for changes in followed.evaluate(attempt_id, step):
                self._change(followed, changes, acts, rows)
        followed.forget()
        return acts, rows

    def _change(
        self,
        followed: FollowedRun,
        changes: FiringChanges,
        acts: list[DueFiring],
        rows: list[Put | Delete],
    ) -> None:
        """Collect the rows and actions of a step's changes."""
        for firing in changes.fired:
            due = followed.explain(firing, self._wall(), self.revision)
            if due is None:
                continue
            key = (due.rule.name, firing.at)
            taken: dict[str, Json] = {}
            if key in followed.acted:
                pass  # it names more series than before: its actions were taken
            elif firing.cools_since is None:
                taken = {"actions": None, "acted_wall": None}
                followed.acted.add(key)
                acts.append(due)
            else:
                since = {"cools_since": firing.cools_since.step}
                taken = {"actions": since if due.rule.actions.costs else {}}
                taken["acted_wall"] = self._wall()
            rows += [Put("firings", {**due.row, **taken}), *finding_of(due)]
            if _finds_non_finite(due.rule):
                # The state while the step was open; the rule's finding names every rank.
                place = {"attempt_id": due.row["attempt_id"], "step": due.row["step"]}
                rows.append(Delete("findings", {"kind": NON_FINITE_SCALARS, **place}))
        for rule, at in changes.withdrawn:
            key_row: FiringKey = {
                "attempt_id": followed.ids[at.attempt],
                "step": at.step,
                "rule": rule,
            }
            rows.append(Put("firings", {**key_row, "withdrawn_wall": self._wall()}))
            rows.append(Delete("findings", {"finding_id": finding_of_firing(key_row)}))


def _finds_non_finite(rule: Rule) -> bool:
    """Return whether a rule makes findings of scalars that are not finite."""
    return rule.metric.startswith(NONFINITE_SCALAR) and rule.actions.finding is not None


def _readable(document: Json) -> Rules:
    """Read stored rules; return the defaults if they are of another version and cannot be read."""
    try:
        return Rules.parse(document)
    except InvalidPlan:
        logger.exception("the stored rules cannot be read: the defaults are in force")
        return defaults()


def _id(due: DueFiring) -> tuple[int, int, str]:
    row = due.row
    return row["attempt_id"], row["step"], row["rule"]
