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

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from stagescope import discovery
from stagescope.answers import Status
from stagescope.asking import LIMIT, segment, step_word
from stagescope.columns import COLUMNS
from stagescope.comparing import Comparing
from stagescope.engine_registry import EngineRegistry
from stagescope.findings import FINDING_ORDER, LOSS_ORDER, Finding, FindingRows
from stagescope.frames import Table
from stagescope.hangs import Stacks
from stagescope.orders import CaptureRequests
from stagescope.series import Exact, Series
from stagescope.step import Step
from stagescope.weights import DEVICE_ORDER, VERSION_ORDER, WEIGHT_ORDER, Weights
from stagescope.wire.errors import NotFound
from stagescope.wire.framing import MEDIA_TYPE, Taken, pack_batch

if TYPE_CHECKING:
    from stagescope.engines import HttpEngine

StepWord = int | Literal["latest", "measured", "captured"]
"""How a step is named."""
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
    "gap",
    "begun_again",
    "losses",
    "superseded_by",
    "missing",
)
_POLL_SECONDS: Final = 2.0


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


class Session(CaptureRequests, Comparing, EngineRegistry):
    """What the service knows, a method a noun; usable from several threads.

    Each answer names the run and attempt that it is about. Without `run` that is the run whose
    training stage began last, without `attempt` its latest.
    """

    def status(self) -> Status:
        """Return how the service is: ready or why not, versions, what it knows."""
        return Status(self.get("/status"), title=f"stagescope at {self.url}")

    def runs(self, *, limit: int = LIMIT) -> Table:
        """Return the runs, the one that was active last first."""
        return self.table(
            "/runs", title="runs", order=_RUN_ORDER, columns=COLUMNS["runs"], limit=limit
        )

    def attempts(self, run: str | None = None, *, limit: int = LIMIT) -> Table:
        """Return a run's attempts with their fingerprints."""
        name = run if run is not None else self._newest_run()
        return self.table(
            f"/runs/{segment(name, 'run')}/attempts",
            title="attempts",
            order=_ATTEMPT_ORDER,
            columns=COLUMNS["attempts"],
            limit=limit,
        )

    def steps(
        self, run: str | None = None, attempt: int | None = None, *, limit: int = LIMIT
    ) -> Table:
        """Return the steps, with how complete each is, the newest first."""
        params = {"run": run, "attempt": attempt}
        return self.table(
            "/steps",
            params,
            title="steps",
            order=_STEPS_ORDER,
            columns=COLUMNS["steps"],
            limit=limit,
        )

    def step(
        self,
        step: StepWord = "latest",
        *,
        run: str | None = None,
        attempt: int | None = None,
    ) -> Step:
        """Return one step; it stays at the run and attempt that answer now.

        `"latest"` is the step that began last, which may hold no numbers yet; `"measured"` is the
        newest closed one that does (the latest, where it holds some and none is closed);
        `"captured"` is the newest one of which a capture left operators.

        Raises:
            NotFound: no such step; of `"measured"`, no step of the run has numbers, with what the
                latest lacks.
        """
        if step == "measured":
            return self._measured(run, attempt)
        if step == "captured":
            said = self.get("/steps/latest/operators", run=run, attempt=attempt, limit=1)
            return Step(self, said["step"], run=said.get("run"), attempt=said.get("attempt"))
        said = self.get(f"/steps/{step_word(step)}/stages", run=run, attempt=attempt, limit=1)
        return Step(
            self,
            said["step"],
            run=said.get("run"),
            attempt=said.get("attempt"),
            gap=said.get("gap"),
        )

    def series(
        self,
        metric: str,
        *,
        by: Literal["rank", "round", "staleness"] | None = None,
        run: str | None = None,
        attempt: int | None = None,
        stage: str | None = None,
        role: str | None = None,
        rank: int | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        superseded: bool = False,
        limit: int = 10_000,
    ) -> Series:
        """Return one number over the steps of a run, a row a step, a column a series.

        Args:
            metric: a published metric (`rollout_corr/k3_kl`), or the name of a scalar (`loss`).
            by: a series for each rank, round or staleness; scalars only by rank. Without it the
                step's own number, of scalars the mean over ranks and parts.
            run, attempt: of these; without `attempt` those in force, each step once.
            stage: scalars only: those of this stage.
            role, rank: only these.
            from_step, to_step: the first and the last step.
            superseded: also the steps that a later attempt did again.
            limit: most steps, the newest.

        Raises:
            NotFound: no metric and no scalar has that name, with what may be meant.

        Usage:
            >>> session.series("rollout_corr/k3_kl", by="rank").to_pandas()
        """
        answer = self.get(
            "/series", metric=metric, by=by, run=run, attempt=attempt, stage=stage, role=role,
            rank=rank, superseded=superseded or None, limit=limit,
            **{"from": from_step, "to": to_step},
        )  # fmt: skip
        return Series.from_answer(answer)

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
                "/weights",
                params,
                title="versions of weights",
                order=VERSION_ORDER,
                columns=COLUMNS["versions"],
                limit=limit,
            )
        params["verdict"] = verdict
        path = f"/weights/{version}"
        return Weights.of(
            self.table(path, params, order=WEIGHT_ORDER, columns=COLUMNS["weights"], limit=limit)
        )

    def devices(self, run: str | None = None, *, limit: int = LIMIT) -> Table:
        """Return the devices whose weights were not their replicas', over all runs by default.

        `odd` counts the recorded versions in which most replicas held something else, `suspected`
        those without a majority.
        """
        return self.table(
            "/devices",
            {"run": run},
            title="devices",
            order=DEVICE_ORDER,
            columns=COLUMNS["devices"],
            limit=limit,
        )

    def exact(self, run: str | None = None, attempt: int | None = None) -> Exact:
        """Return in which steps trainer and rollout agree in every bit, and where first not.

        Without `attempt`, of the attempts in force: a step that a later one did again counts there.

        Usage:
            >>> found = session.exact("my-run")
            >>> print(found.text)    # steps 1-412 exact (...); 413 first differs: sample ...
            >>> found.first          # step, sample_uid, round, position, token_id, p, q
        """
        return Exact(self.get("/exact", run=run, attempt=attempt))

    def losses(
        self,
        run: str | None = None,
        attempt: int | None = None,
        *,
        only: str | None = None,
        limit: int = LIMIT,
    ) -> FindingRows:
        """Return what was announced and never arrived, with the reasons; see `findings`."""
        params = {"run": run, "attempt": attempt, "only": only}
        return self._noticed("/losses", params, "losses", LOSS_ORDER, limit)

    def findings(
        self,
        run: str | None = None,
        attempt: int | None = None,
        *,
        only: str | None = None,
        limit: int = LIMIT,
    ) -> FindingRows:
        """Return what the service noticed to be wrong, a row each, the last seen first.

        It is shown by `groups`: one for what lasts over steps and ranks, the most severe first.

        Args:
            run, attempt: of these.
            only: severities and patterns of kinds, joined by commas: `"error"`,
                `"streams_*,non_finite_operator"`.
            limit: most rows.

        Raises:
            NotFound: no finding is of such a kind.
        """
        params = {"run": run, "attempt": attempt, "only": only}
        return self._noticed("/findings", params, "findings", FINDING_ORDER, limit)

    def finding(self, finding_id: str) -> Finding:
        """Return one finding whole, by its id or how it begins.

        Raises:
            NotFound: there is none.
        """
        return Finding(self.get(f"/findings/{segment(finding_id, 'finding_id')}"))

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

    def send(
        self,
        sender: Sequence[Any],
        events: Sequence[Sequence[Any]],
        payloads: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> Taken:
        """Send events of a process that is not this one; return which were refused, and why.

        An event may be refused in part, too: a scalar that is no number, say.
        `stagescope.wire.schema` says what travels. What was sent before counts once.

        Raises:
            Unauthorized: it needs the operate token.
        """
        body = pack_batch(sender, events, payloads or {})
        answer = self._transport.deliver("/events", body, MEDIA_TYPE)
        return Taken.from_answer(answer)

    def settled(self, sender: Sequence[Any], seqs: Sequence[int]) -> dict[int, str]:
        """Return seq -> state of a process's payloads that were taken in, after a short wait.

        Raises:
            Unauthorized: it needs the operate token.
        """
        said = {"sender": [*sender], "unreceipted": [*seqs], "wait": _POLL_SECONDS}
        answer = self._transport.change("POST", "/poll", said)
        return {int(seq): str(state) for seq, state in (answer.get("receipts") or {}).items()}

    def _measured(self, run: str | None, attempt: int | None) -> Step:
        """Return the newest step that has numbers.

        Raises:
            NotFound: there is none.
        """
        steps = self.steps(run, attempt, limit=_RECENT)
        for row in steps:
            in_force = attempt is not None or row.get("superseded_by") is None
            if row.get("measured") and in_force:
                gap = row.get("gap")
                return Step(self, row["step"], run=row["run"], attempt=row["attempt"], gap=gap)
        latest = self.step("latest", run=run, attempt=attempt)
        try:
            latest.metrics()  # of an open step, as far as it has come
        except NotFound as error:
            of = f"run {latest.run}" + ("" if attempt is None else f", attempt {attempt},")
            which = "no step" if len(steps) < _RECENT else f"none of the newest {_RECENT} steps"
            raise NotFound(
                f"{which} of {of} has numbers; the latest: {error.wrong}",
                expected=error.expected,
                advice=error.advice,
            ) from error
        return latest

    def _newest_run(self) -> str:
        runs = self.runs(limit=1)
        if not len(runs):
            raise NotFound("the service has no run yet", advice="start a training that reports")
        return str(runs[0]["run"])
