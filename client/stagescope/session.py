"""A connection to the running service: `attach()` and `Session`.

Usage::

    import stagescope

    session = stagescope.attach()                     # or attach("http://head:8700", token=...)
    session.runs()
    step = session.step("latest")
    step.metrics()["rollout_corr/k3_kl"]
    step.rounds().to_pandas()
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote, urlencode

from stagescope import discovery, nonfinite
from stagescope.answers import Record
from stagescope.changes import CHANGE_ORDER, Changes
from stagescope.compared import Compared
from stagescope.engines.http import engine_url
from stagescope.errors import (
    CatalogueUnavailable,
    InvalidInput,
    NotFound,
    NotReady,
    StagescopeError,
    Unreachable,
)
from stagescope.frames import Table
from stagescope.framing import MEDIA_TYPE, pack_batch
from stagescope.hangs import Stacks
from stagescope.operators import Divergence
from stagescope.progress import Ordered, Progress
from stagescope.step import LIMIT, Step
from stagescope.tensors import ORDER, Tensors
from stagescope.transport import Transport
from stagescope.triggers import FIRING_ORDER, Triggers, dry_run
from stagescope.weights import DEVICE_ORDER, VERSION_ORDER, WEIGHT_ORDER, Weights

if TYPE_CHECKING:
    from stagescope.engines import HttpEngine

StepWord = int | Literal["latest", "measured", "captured"]
"""How a step is named."""
_PAGE: Final = 500
_ASK_AGAIN: Final = 0.5
"""Seconds between two questions about something that the service is computing."""
_RECENT: Final = 100
"""Steps in which the newest measured one is looked for."""

# Columns that are shown first: a table in 80 columns leaves out the last.
_RUN_ORDER: Final = ("run", "live", "attempt", "last_closed_step", "last_wall")
_ATTEMPT_ORDER: Final = ("attempt", "state", "first_step", "last_closed_step", "resumed_from_step")
_STEPS_ORDER: Final = (
    "step",
    "attempt",
    "complete",
    "measured",
    "losses",
    "superseded_by",
    "missing",
)
_FINDING_ORDER: Final = ("kind", "step", "rank", "message", "stage", "severity", "role", "count")
_BETWEEN_QUESTIONS: Final = 0.5
_POLL_SECONDS: Final = 2.0
_PLAN_ORDER: Final = (
    "capture_id", "state", "start", "run", "steps", "stages", "ranks", "roles", "by", "created",
)  # fmt: skip
_ENGINE_ORDER: Final = ("name", "state", "age_seconds", "kind", "url", "model", "used_by")
_LOSS_ORDER: Final = ("step", "stage", "role", "rank", "kind", "count", "reason", "run", "attempt")


def engine(name: str, *, key_file: str | Path | None = None, timeout: float = 120.0) -> HttpEngine:
    """Return an engine that was registered with the service of `attach()`, by its name.

    Raises:
        Unreachable: no service is known, or nothing answers there.
        NotFound, EngineError: as `Session.engine`.
    """
    with attach() as session:
        return session.engine(name, key_file=key_file, timeout=timeout)


def attach(url: str | None = None, *, token: str | None = None, timeout: float = 10.0) -> Session:
    """Connect to the service of this machine's user, or to the one at `url`.

    Where no `url` is given: `STAGESCOPE_URL`, then `$STAGESCOPE_HOME/service.json`, which
    `stagescope serve` wrote. Where no `token` is given: `STAGESCOPE_TOKEN`, then that file's
    tokens if the URL is its own. `timeout` is the deadline of each call in seconds, retries
    included.

    Raises:
        Unreachable: no service is known, or nothing answers there.
        Unauthorized: the service does not accept the token, or wants one.
    """
    session = Session(discovery.find(url, token), timeout=timeout)
    try:
        session.check()
    except BaseException:
        session.close()
        raise
    return session


class Session:
    """What the service knows, a method a noun; usable from several threads.

    Each answer names the run and attempt that it is about. Without `run` that is the run whose
    training stage began last, without `attempt` its latest.
    """

    def __init__(self, place: discovery.Place, *, timeout: float = 10.0) -> None:
        self._place = place
        self._transport = Transport(place, timeout=timeout)

    @property
    def url(self) -> str:
        """The service's URL."""
        return self._place.url

    def close(self) -> None:
        """Close the connections; the session cannot be used afterwards."""
        self._transport.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<stagescope.Session {self.url}, found by {self._place.found}>"

    def check(self) -> None:
        """Return if the service answers and accepts the token.

        Raises:
            Unreachable: nothing answers, or something else does.
            Unauthorized: no token, or a wrong one.
        """
        alive = self._transport.get("/healthz", patient=False)
        if not isinstance(alive, dict):
            raise Unreachable(
                f"what answers at {self.url} is not a stagescope service", advice="check the URL"
            )
        try:
            self._transport.get("/runs", {"limit": 1}, patient=False)
        except (NotReady, CatalogueUnavailable):
            # It lives and will answer; a later call waits for it with its own deadline.
            return

    def get(self, path: str, **params: Any) -> Any:
        """Return what a route answers, as it came; a query parameter of None is left out."""
        return self._transport.get(path, params)

    def download(
        self,
        path: str,
        params: Mapping[str, Any],
        write: Callable[[bytes, int], object],
        *,
        timeout: float,
    ) -> None:
        """Hand the bytes of a route's answer to `write`, piece by piece; see `Transport`."""
        self._transport.download(path, params, write, timeout=timeout)

    def table(
        self,
        path: str,
        params: Mapping[str, Any] | None = None,
        *,
        title: str = "",
        order: Sequence[str] = (),
        limit: int = LIMIT,
    ) -> Table:
        """Return the rows of a route, its pages followed up to `limit` rows."""
        if limit < 1:
            raise InvalidInput(f"limit is {limit}", expected="a number of rows from 1")
        asked = dict(params or {})
        rows: list[Mapping[str, Any]] = []
        about: dict[str, Any] = {}
        seen: set[str] = set()
        while True:
            asked["limit"] = min(limit - len(rows), _PAGE)
            answer = self._transport.get(path, asked)
            if not isinstance(answer, dict) or not isinstance(answer.get("rows"), list):
                raise StagescopeError(
                    f"{path} answered without rows",
                    advice="bring service and client to versions that belong together",
                )
            rows += answer["rows"]
            following = answer.get("next")
            about = about or {n: v for n, v in answer.items() if n not in ("rows", "next")}
            if "whole" in about:
                about["whole"] = nonfinite.numbers(about["whole"])
            # A page that leads to itself would never end.
            if following is None or len(rows) >= limit or following in seen:
                break
            seen.add(following)
            asked["cursor"] = following
        return Table.from_rows(
            rows[:limit],
            order=order,
            title=title,
            about=about,
            truncated=following is not None or len(rows) > limit,
        )

    def status(self) -> Record:
        """Return how the service is: ready or why not, versions, what it knows."""
        return Record(self.get("/status"), title=f"stagescope at {self.url}")

    def runs(self, *, limit: int = LIMIT) -> Table:
        """Return the runs, the one that was active last first."""
        return self.table("/runs", title="runs", order=_RUN_ORDER, limit=limit)

    def attempts(self, run: str | None = None, *, limit: int = LIMIT) -> Table:
        """Return a run's attempts with their fingerprints."""
        name = run if run is not None else self._newest_run()
        return self.table(
            f"/runs/{_segment(name)}/attempts",
            title="attempts",
            order=_ATTEMPT_ORDER,
            limit=limit,
        )

    def steps(
        self, run: str | None = None, attempt: int | None = None, *, limit: int = LIMIT
    ) -> Table:
        """Return the steps, with how complete each is, the newest first."""
        params = {"run": run, "attempt": attempt}
        return self.table("/steps", params, title="steps", order=_STEPS_ORDER, limit=limit)

    def step(
        self,
        step: StepWord = "latest",
        *,
        run: str | None = None,
        attempt: int | None = None,
    ) -> Step:
        """Return one step; it stays at the run and attempt that answer now.

        `"latest"` is the step that began last, which may hold no numbers yet; `"measured"` is the
        newest closed one that does (the latest where there is none); `"captured"` is the newest
        one of which a capture left operators.

        Raises:
            NotFound: no such step.
        """
        if step == "measured":
            for row in self.steps(run, attempt, limit=_RECENT):
                in_force = attempt is not None or row.get("superseded_by") is None
                if row.get("measured") and in_force:
                    return Step(self, row["step"], run=row["run"], attempt=row["attempt"])
            step = "latest"
        if step == "captured":
            said = self.get("/steps/latest/operators", run=run, attempt=attempt, limit=1)
            return Step(self, said["step"], run=said.get("run"), attempt=said.get("attempt"))
        said = self.get(f"/steps/{_step_word(step)}/stages", run=run, attempt=attempt, limit=1)
        return Step(self, said["step"], run=said.get("run"), attempt=said.get("attempt"))

    def plan(self, run: str | None = None) -> Table:
        """Return the captures in force, with `run` those that concern it.

        `about["revision"]` is the plan's revision.
        """
        answer = self.get("/plan")
        captures = answer.get("captures") or []
        if run is not None:
            captures = [each for each in captures if each.get("run") in (None, run)]
        rows = [{**each, **_standing(each.get("agreement") or {})} for each in captures]
        about = {name: value for name, value in answer.items() if name != "captures"}
        title = f"plan, revision {answer.get('revision')}"
        return Table.from_rows(rows, order=_PLAN_ORDER, title=title, about=about)

    def captures(self, run: str | None = None, *, limit: int = LIMIT) -> Table:
        """Return the captures that were ever ordered, newest first, withdrawn ones too."""
        return self.table(
            "/captures", {"run": run}, title="captures", order=_PLAN_ORDER, limit=limit
        )

    def weights(
        self,
        version: int | None = None,
        *,
        run: str | None = None,
        attempt: int | None = None,
        verdict: str | None = None,
        limit: int = LIMIT,
    ) -> Table:
        """Return the recorded versions of weights and their verdicts, the newest first.

        With `version` its weights, as `Step.weights` does.

        Raises:
            NotFound: no weights of that version were recorded.
        """
        params = {"run": run, "attempt": attempt}
        if version is None:
            return self.table(
                "/weights", params, title="versions of weights", order=VERSION_ORDER, limit=limit
            )
        params["verdict"] = verdict
        path = f"/weights/{version}"
        return Weights.of(self.table(path, params, order=WEIGHT_ORDER, limit=limit))

    def devices(self, run: str | None = None, *, limit: int = LIMIT) -> Table:
        """Return the devices whose weights were not their replicas', over all runs by default.

        `odd` counts the recorded versions in which most replicas held something else, `suspected`
        those without a majority.
        """
        return self.table(
            "/devices", {"run": run}, title="devices", order=DEVICE_ORDER, limit=limit
        )

    def send(
        self,
        sender: Sequence[Any],
        events: Sequence[Sequence[Any]],
        payloads: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> dict[int, str]:
        """Send events of a process that is not this one; return which were refused, and why.

        `stagescope.schema` says what travels. What was sent before counts once.

        Raises:
            Unauthorized: it needs the operate token.
        """
        body = pack_batch(sender, events, payloads or {})
        answer = self._transport.deliver("/events", body, MEDIA_TYPE)
        return {int(seq): str(text) for seq, text in (answer.get("refused") or {}).items()}

    def settled(self, sender: Sequence[Any], seqs: Sequence[int]) -> dict[int, str]:
        """Return seq -> state of a process's payloads that were taken in, after a short wait.

        Raises:
            Unauthorized: it needs the operate token.
        """
        said = {"sender": [*sender], "unreceipted": [*seqs], "wait": _POLL_SECONDS}
        answer = self._transport.change("POST", "/poll", said)
        return {int(seq): str(state) for seq, state in (answer.get("receipts") or {}).items()}

    def diff(self, a: str, b: str) -> Changes:
        """Return what changed between two attempts or runs, `run[@attempt]` each.

        Their fingerprints (git, configuration, packages, drivers, environment) and where each
        rank ran, what decides numbers first. Without an attempt: the run's newest.

        Raises:
            NotFound: no such run or attempt.
        """
        params = {"a": a, "b": b}
        return Changes.of(self.table("/diff", params, title="diff", order=CHANGE_ORDER))

    def losses(
        self, run: str | None = None, attempt: int | None = None, *, limit: int = LIMIT
    ) -> Table:
        """Return what was announced and never arrived, with the reasons."""
        params = {"run": run, "attempt": attempt}
        return self.table("/losses", params, title="losses", order=_LOSS_ORDER, limit=limit)

    def findings(
        self, run: str | None = None, attempt: int | None = None, *, limit: int = LIMIT
    ) -> Table:
        """Return what the service noticed to be wrong, with its evidence."""
        params = {"run": run, "attempt": attempt}
        return self.table("/findings", params, title="findings", order=_FINDING_ORDER, limit=limit)

    def stacks(
        self,
        run: str | None = None,
        attempt: int | None = None,
        *,
        role: str | None = None,
        ranks: Sequence[int] | None = None,
        wait: float = 5.0,
    ) -> Stacks:
        """Ask live processes for the stacks of their threads, also where they are blocked.

        Those who answer within `wait` seconds (less than this session's timeout) are in `rows`;
        `not_answered` names the others. All of it is kept: see `Step.stacks`.

        Raises:
            Forbidden: the token may only read.
            NotFound: no such run or attempt, or it is over.
        """
        asked = {"run": run, "attempt": attempt, "role": role}
        body: dict[str, Any] = {name: word for name, word in asked.items() if word is not None}
        if ranks is not None:
            body["ranks"] = [*ranks]
        body["wait"] = min(wait, 0.8 * self._transport.timeout)
        answer = self._transport.change("POST", "/stacks", body)
        return Stacks(answer, title=f"stacks of {answer['run']}, attempt {answer['attempt']}")

    def triggers(self, run: str | None = None) -> Triggers:
        """Return the rules in force, when each fired last (in `run`), budgets and pinned steps."""
        return Triggers.of_answer(self.get("/triggers", run=run))

    def set_triggers(self, document: Mapping[str, Any] | str) -> Record:
        """Put rules in force for the steps that close from now on; needs the operate token.

        Args:
            document: `{"rules": [...], "runs": {...}}`, or the same as YAML.

        Raises:
            InvalidPlan: with the field that is wrong.
        """
        body = {"yaml": document} if isinstance(document, str) else dict(document)
        return Record(self._transport.change("PUT", "/triggers", body) or {}, title="triggers")

    def test_triggers(
        self,
        run: str | None = None,
        document: Mapping[str, Any] | str | None = None,
        *,
        steps: int | None = None,
    ) -> Table:
        """Return which stored steps of a run would have fired, and with which values.

        Nothing follows of it. Without a `document` the rules in force are tried; `steps` says how
        many of the newest are looked at (1000).
        """
        body = {"yaml": document} if isinstance(document, str) else dict(document or {})
        asked = {"run": run, "steps": steps}
        body |= {name: value for name, value in asked.items() if value is not None}
        return dry_run(self._transport.ask("/triggers/test", body))

    def default_triggers(self) -> str:
        """Return the rules that ship, as YAML."""
        return str(self.get("/triggers/defaults")["yaml"])

    def firings(
        self, run: str | None = None, rule: str | None = None, *, limit: int = LIMIT
    ) -> Table:
        """Return what fired, the last first, with what became of its actions."""
        params = {"run": run, "rule": rule}
        path = "/triggers/firings"
        return self.table(path, params, title="firings", order=FIRING_ORDER, limit=limit)

    def pin(self, step: int, *, run: str | None = None, attempt: int | None = None) -> Record:
        """Let the kept files and recent payloads of a step stay; needs the operate token."""
        path = _pin_path(step, run, attempt)
        return Record(self._transport.change("PUT", path) or {}, title="pinned")

    def unpin(self, step: int, *, run: str | None = None, attempt: int | None = None) -> Record:
        """Let what is held of a pinned step go when room is needed; needs the operate token."""
        path = _pin_path(step, run, attempt)
        return Record(self._transport.change("DELETE", path) or {}, title="unpinned")

    def capture(self, **spec: Any) -> Ordered:
        """Order a capture: `stagescope.captures` has its CAPTURE_FIELDS and SHORTHANDS.

        Without `steps` it is of the next. Every asked rank acknowledges first, and then the step
        is fixed on which it starts: the answer is of the moment after, or of 2 s later; `wait_for`
        waits until the dumps lie there.

        Usage:
            >>> ordered = session.capture(stages=["actor_update"], level="L1")
            >>> session.wait_for(ordered["capture_id"]).dumps()

        Raises:
            InvalidPlan: a field that cannot be carried out.
            Conflict: the same order is in force, or its steps have begun.
            Forbidden: the token may only read, or a path lies outside the allowed roots.
        """
        steps = spec.setdefault("steps", "next")
        if isinstance(steps, int) and not isinstance(steps, bool):
            spec["steps"] = [steps]
        return Ordered(self._transport.change("POST", "/captures", spec) or {})

    def progress(self, capture_id: str) -> Progress:
        """Return how far a capture has come.

        Raises:
            NotFound: no such capture.
        """
        return Progress(self.get(f"/captures/{_segment(capture_id)}"))

    def wait_for(
        self,
        capture_id: str,
        *,
        timeout: float | None = None,
        told: Callable[[Progress], None] = lambda progress: None,
    ) -> Progress:
        """Wait until a capture has collected all it will; return how far it has come.

        It returns as well where no rank that the capture asks is there (any more).

        Args:
            capture_id: the capture.
            timeout: seconds after which to return all the same; None: as long as it takes.
            told: called with each change.

        Raises:
            NotFound: no such capture.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        said: list[str] | None = None
        while True:
            found = self.progress(capture_id)
            if (now := found.lines()) != said:
                said = now
                told(found)
            over = found.ended or found.is_abandoned
            if over or (deadline is not None and time.monotonic() >= deadline):
                return found
            time.sleep(_BETWEEN_QUESTIONS)

    def remove_capture(self, capture_id: str) -> Record:
        """Take a capture out of the plan and return it; what it has collected stays.

        Raises:
            NotFound: no such capture is in force.
        """
        answer = self._transport.change("DELETE", f"/captures/{_segment(capture_id)}")
        return Record(answer or {"capture_id": capture_id}, title="withdrawn capture")

    def divergence(
        self,
        a: Mapping[str, Any],
        b: Mapping[str, Any],
        *,
        factor: float | None = None,
        by_dtype: Mapping[str, float] | None = None,
        exact: bool = False,
        skip_sharded: bool = False,
        limit: int | None = None,
    ) -> Divergence:
        """Return the first operator, parameter and gradient in which two dumps differ.

        Args:
            a, b: run, attempt, step, stage, role, rank, part, capture_id; what `b` leaves out is
                as in `a`.
            factor: threshold in eps of the coarsest dtype up to there; the service takes 4, and
                100 where the devices are of two kinds.
            by_dtype: dtype -> threshold of the relative difference, in the place of that.
            exact: every number must be equal.
            skip_sharded: leave out tensors of which each rank holds another shard.
            limit: most rows that differ in the answer; all are counted.

        Usage:
            >>> session.divergence({"step": 5, "rank": 0}, {"rank": 1})
            >>> session.divergence({"step": 5, "rank": 0, "attempt": 1}, {"attempt": 2})
        """
        body = {
            "a": dict(a), "b": dict(b), "factor": factor, "exact": exact,
            "by_dtype": None if by_dtype is None else dict(by_dtype),
            "skip_sharded": skip_sharded, "limit": limit,
        }  # fmt: skip
        said = {name: value for name, value in body.items() if value is not None}
        return Divergence.from_answer(self._transport.ask("/operators/divergence", said))

    def tensors(
        self, a: Mapping[str, Any], b: Mapping[str, Any], *, limit: int = LIMIT, wait: float = 900.0
    ) -> Tensors:
        """Return how the full tensors of two dumps (task `tensor`) differ, compared by msprobe.

        Args:
            a, b: as in `divergence`.
            limit: most rows; `about["count"]` says how many there are.
            wait: seconds; msprobe takes one for some hundred tensors.

        Raises:
            NotReady: msprobe was not done in time; the same may be asked again.
        """
        body = {"a": dict(a), "b": dict(b), "limit": limit}
        answer = self._patiently("/operators/tensors", body, wait)
        about = {name: value for name, value in answer.items() if name != "rows"}
        found = Table.from_rows(answer["rows"], order=ORDER, title="tensors", about=about)
        return Tensors.of(found)

    def _patiently(self, path: str, body: Any, wait: float) -> Any:
        """Ask a long question again until it is answered, for `wait` seconds at most."""
        deadline = time.monotonic() + wait
        while True:
            try:
                return self._transport.ask(path, body, patient=False)
            except NotReady:  # noqa: PERF203 - it is being computed
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_ASK_AGAIN)

    def compare(
        self,
        a: str | Mapping[str, Any],
        b: str | Mapping[str, Any],
        c: str | Mapping[str, Any] | None = None,
        *,
        tolerances: Sequence[str] = (),
        wait: float = 900.0,
    ) -> Compared:
        """Hold what is kept of two or three steps, attempts or runs against each other.

        Args:
            a, b, c: `run[@attempt][:step]` (without a step: all that every side still holds), or
                `{"directory": path}` on the service's machine.
            tolerances: `PATTERN=ATOL[,RTOL]`: what counts as noise, beside the defaults.
            wait: seconds.

        Raises:
            NotFound: no such run or step, or nothing of it is kept.
            NotReady: it was not done in time; the same may be asked again.
        """
        body = {"a": a, "b": b, "c": c, "tolerances": [*tolerances]}
        answer = self._patiently("/comparisons", body, wait)
        return Compared(answer, save=functools.partial(self._save_page, body, wait))

    def _save_page(self, asked: Mapping[str, Any], wait: float, path: Path) -> None:
        sides = {name: asked[name] for name in ("a", "b", "c")}
        if not all(isinstance(side, str | None) for side in sides.values()):
            raise InvalidInput("a page is made of runs only", expected="RUN[@ATTEMPT][:STEP]")
        params = {**sides, "tolerances": ";".join(asked["tolerances"]) or None}
        with path.open("wb") as file:
            self._transport.download(
                "/comparisons/page", params, lambda piece, _: file.write(piece), timeout=wait
            )

    def engines(self, *, check: bool = False, limit: int = LIMIT) -> Table:
        """Return the registered long-lived engines, and how each answered last.

        With `check` the service asks each engine's health path first, two seconds at most.
        """
        params = {"check": "true" if check else None}
        return self.table("/engines", params, title="engines", order=_ENGINE_ORDER, limit=limit)

    def engine(
        self, name: str, *, key_file: str | Path | None = None, timeout: float = 120.0
    ) -> HttpEngine:
        """Return a registered engine by its name, ready to be asked; see `stagescope.engines`.

        Args:
            name: as it was registered.
            key_file, timeout: as `stagescope.engines.connect`.

        Raises:
            NotFound: no engine is called so.
            EngineError: it does not answer, or is no inference engine any more.
        """
        from stagescope.engines import connect

        row = self.get(f"/engines/{_segment(name)}")
        return connect(str(row["url"]), key_file=key_file, timeout=timeout)

    def add_engine(self, url: str, **said: Any) -> Record:
        """Register an engine with the service; needs the operate token.

        Args:
            url: `http://HOST:PORT`, or HOST:PORT.
            said: `stagescope.engines.registry` has its ENGINE_FIELDS; None is left out.
        """
        body = {name: value for name, value in said.items() if value is not None}
        answer = self._transport.change("POST", "/engines", {**body, "url": engine_url(url)})
        return Record(answer or {}, title="registered engine")

    def remove_engine(self, name: str) -> Record:
        """Take an engine out of the registry; the engine itself is left alone.

        Raises:
            NotFound: no engine is called so.
        """
        answer = self._transport.change("DELETE", f"/engines/{_segment(name)}")
        return Record(answer or {"name": name}, title="engine, no longer registered")

    def _newest_run(self) -> str:
        runs = self.runs(limit=1)
        if not len(runs):
            raise NotFound("the service has no run yet", advice="start a training that reports")
        return str(runs[0]["run"])


def _standing(agreement: Mapping[str, Any]) -> dict[str, Any]:
    return {"state": agreement.get("phase"), "start": agreement.get("start")}


def _segment(text: str) -> str:
    if text in ("", ".", ".."):
        raise InvalidInput(f"{text!r} is not a name", expected="a name")
    return quote(text, safe="")


def _pin_path(step: int, run: str | None, attempt: int | None) -> str:
    asked = {"run": run, "attempt": attempt}
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    return f"/steps/{_step_word(step)}/pin" + (f"?{query}" if query else "")


def _step_word(step: Any) -> str:
    if step == "latest" or (isinstance(step, int) and not isinstance(step, bool)):
        return str(step)
    raise InvalidInput(f"step is {step!r}", expected="an int, 'latest', 'measured' or 'captured'")
