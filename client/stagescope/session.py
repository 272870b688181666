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

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from stagescope.answers import Record, Status
from stagescope.canary import CanaryVersions
from stagescope.capture_requests import CaptureRequests
from stagescope.comparison_requests import ComparisonRequests
from stagescope.connection import LIMIT, OptInt, OptStr, segment, step_segment
from stagescope.figures import FigureRequests
from stagescope.findings import FINDING_ORDER, LOSS_ORDER, Diagnosis, Finding, FindingRows
from stagescope.forwarding import PREFIX
from stagescope.link_text import session_call
from stagescope.run_requests import RunRequests
from stagescope.saving import FileRequests, is_bundle, open_bundle
from stagescope.sending import SendRequests
from stagescope.series import Exact, Series
from stagescope.step import Step
from stagescope.step_answers import Stacks, Steps, Stuck, Weights
from stagescope.table import Table
from stagescope.transport import given
from stagescope_wire import discovery
from stagescope_wire.errors import NotFound, StagescopeError
from stagescope_wire.links import LinkText
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.render_html import html_block, html_text

if TYPE_CHECKING:
    from stagescope_wire.engines import HttpEngine

StepName = int | Literal["latest", "measured", "captured"]
"""A step's number, or a name for a step; see `Session.step`."""

_UNPACK_SECONDS: Final = 600.0


def engine(name: str, *, key_file: str | Path | None = None, timeout: float = 120.0) -> HttpEngine:
    """Connect to an engine that is registered with the service of `attach()`.

    Raises:
        Unreachable: no service is known, or nothing answers there.
        NotFound, EngineError: as `Session.engine`.
    """
    with attach() as session:
        return session.engine(name, key_file=key_file, timeout=timeout)


def attach(
    url: str | Path | None = None, *, token: OptStr = None, timeout: float = 10.0,
    link_text: LinkText = session_call,
) -> Session:  # fmt: skip
    """Connect to the service of this machine's user, or to the one at `url`; or open a bundle.

    `url` may be an archive of `stagescope bundle`: a separate process then serves it on loopback,
    read only, until the session is closed. That needs the extra `service`, and no service.

    Without `url`, the session connects to the service in the Ray cluster that this process has
    joined, as `init` does. Next it tries `STAGESCOPE_URL`, then `$STAGESCOPE_HOME/service.json`,
    which `stagescope serve` writes. Without `token` it uses `STAGESCOPE_TOKEN`, then that file's
    tokens if the URL is the file's. Each call with its retries has the deadline `timeout` [s].
    The callback `link_text` returns the words that errors and findings use for links, by default
    calls of the session's methods.

    Raises:
        Unreachable: no service is known, or nothing answers there.
        Unauthorized: the service does not accept the token, or requires one.
        InvalidInput: the archive is no bundle, or damaged.
    """
    on_close: Callable[[], None] = lambda: None  # noqa: E731 - nothing to end
    if url is not None and is_bundle(url):
        location, on_close = open_bundle(url, _UNPACK_SECONDS)
    else:
        in_ray = discovery.find_in_ray(token) if url is None else None
        location = in_ray or discovery.find(None if url is None else str(url), token)
    session = Session(location, timeout=timeout, link_text=link_text, on_close=on_close)
    try:
        session.check()
    except BaseException:
        session.close()
        raise
    return session


class Session(
    CaptureRequests, ComparisonRequests, FigureRequests, FileRequests, RunRequests, SendRequests
):  # fmt: skip
    """The data of the service, one method per noun; safe to use from several threads.

    Each answer names its run and attempt. The default of `run` is the run whose training stage
    began last. The default of `attempt` is the run's latest.

    Usage:
        >>> session.runs(), session.steps(), session.findings(), session.doctor()
        >>> session.step("measured").metrics()["rollout_corr/k3_kl"]
    """

    def _repr_html_(self) -> str:
        """Return the service's address and its runs, or why it does not answer."""
        try:
            found = self.runs(limit=20)._repr_html_()
        except StagescopeError as error:
            found = html_text(str(error))
        return html_block(f"stagescope at {self.url}", found)

    def status(self) -> Status:
        """Return the service's state: ready or the reason why not, versions, counts."""
        return Status(self.get("/status"), title=f"stagescope at {self.url}")

    def attempts(self, run: OptStr = None, *, limit: int = LIMIT) -> Table:
        """Return a run's attempts with their fingerprints."""
        return self.table(f"{self._run_path(run)}/attempts", noun="attempts", limit=limit)

    def steps(self, run: OptStr = None, attempt: OptInt = None, *, limit: int = LIMIT) -> Steps:
        """Return the steps with their completeness, the newest first, superseded ones last."""
        params = {"run": run, "attempt": attempt}
        return Steps.from_table(self.table("/steps", params, noun="steps", limit=limit))

    def step(
        self, step: StepName = "latest", *, run: OptStr = None, attempt: OptInt = None
    ) -> Step:
        """Return one step of the run and attempt that are current now.

        `"latest"` is the step that began last. It may have no numbers yet. `"measured"` is the
        newest closed step with numbers. If no closed step has any, it is the latest with numbers.
        `"captured"` is the newest step with captured operators.

        Raises:
            NotFound: there is no such step. For `"measured"`, no step of the run has numbers; the
                message says what the latest lacks.
        """
        answer = self.get(f"/steps/{step_segment(step)}/stages", run=run, attempt=attempt, limit=1)
        gap = answer.get("gap")
        found = Step(
            self, answer["step"], run=answer.get("run"), attempt=answer.get("attempt"), gap=gap
        )
        if step == "measured" and (gap or answer.get("complete") == "open"):
            self._check_measured(found, attempt)
        return found

    def series(
        self, metric: str, *, by: Literal["rank", "round", "staleness"] | None = None,
        run: OptStr = None, attempt: OptInt = None, stage: OptStr = None, role: OptStr = None,
        rank: OptInt = None, from_step: OptInt = None, to_step: OptInt = None,
        superseded: bool = False, limit: int = 10_000,
    ) -> Series:  # fmt: skip
        """Return one number over the steps of a run: one row per step, one column per series.

        Args:
            metric: a published metric (`rollout_corr/k3_kl`), or the name of a scalar (`loss`).
            by: one series per rank, round or staleness; for scalars only per rank. The default is
                one value per step: the step's own, or a scalar's mean over ranks and parts.
            run, attempt: restrict to these; the default of `attempt` is each step's current one.
            stage: for scalars: only this stage.
            role, rank: only these.
            from_step, to_step: the first and the last step.
            superseded: include steps that a later attempt repeated.
            limit: the most steps; the newest are returned.

        Raises:
            NotFound: no metric or scalar has this name; the message suggests similar names.

        Usage:
            >>> session.series("rollout_corr/k3_kl", by="rank").to_pandas()
        """
        answer = self.get(
            "/series", metric=metric, by=by, run=run, attempt=attempt, stage=stage, role=role,
            rank=rank, superseded=superseded or None, limit=limit,
            **{"from": from_step, "to": to_step},
        )  # fmt: skip
        return Series.from_answer(answer)

    def metric_names(self, run: OptStr = None, *, limit: int = LIMIT) -> Table:
        """Return the names that `series` and `plot` accept: published metrics and logged scalars.

        Usage:
            >>> session.metric_names()["name"]
        """
        path = f"{self._run_path(run)}/metrics"
        return self.table(path, noun="metric_names", title="numbers", limit=limit)

    def weights(
        self, version: OptInt = None, *, run: OptStr = None, attempt: OptInt = None,
        verdict: OptStr = None, limit: int = LIMIT,
    ) -> Table:  # fmt: skip
        """Return the recorded versions of weights and their verdicts, the newest first.

        With `version`, return the weights of that version, as `Step.weights` does.

        Raises:
            NotFound: no weights of that version were recorded.
        """
        params = {"run": run, "attempt": attempt}
        if version is None:
            title = "versions of weights"
            return self.table("/weights", params, noun="versions", title=title, limit=limit)
        params["verdict"] = verdict
        path = f"/weights/{version}"
        return Weights.from_table(self.table(path, params, noun="weights", title="", limit=limit))

    def canary(
        self, run: OptStr = None, version: OptInt = None, *, attempt: OptInt = None,
        limit: int = LIMIT,
    ) -> Table:  # fmt: skip
        """Return the versions that a canary scored, by engine, the newest first.

        With `version`, return the sequences of that version in each pair of arms, the worst first.

        Raises:
            NotFound: no canary of that version was scored.
        """
        params = {"run": run, "attempt": attempt}
        if version is None:
            table = self.table("/canary", params, noun="canary", limit=limit)
            return CanaryVersions.from_table(table)
        path, title = f"/canary/{version}", f"canary of version {version}"
        return self.table(path, params, noun="canary_scores", title=title, limit=limit)

    def devices(self, run: OptStr = None, *, limit: int = LIMIT) -> Table:
        """Return the devices whose weights differed from their replicas', by default of all runs.

        `odd` counts the recorded versions in which the majority of the replicas differed from this
        device, `suspected` those without a majority.
        """
        return self.table("/devices", {"run": run}, noun="devices", limit=limit)

    def exact(self, run: OptStr = None, attempt: OptInt = None) -> Exact:
        """Return the steps in which trainer and rollout are equal, and the first difference.

        Equal is the same number in every token: -0.0 equals 0.0.

        Without `attempt`, each step counts in the latest attempt that computed it.

        Usage:
            >>> found = session.exact("my-run")
            >>> print(found.text)    # steps 1-412 exact (...); step 413 first differs: sample ...
            >>> found.first          # step, sample_uid, round, position, token_id, p, q
        """
        return Exact(self.get("/exact", run=run, attempt=attempt))

    def lost(
        self, run: OptStr = None, attempt: OptInt = None, *, only: OptStr = None, limit: int = LIMIT
    ) -> FindingRows:
        """Return what was announced and never arrived, with the reasons, as `findings` does."""
        params = {"run": run, "attempt": attempt, "only": only}
        return self._findings_table("/losses", params, "losses", LOSS_ORDER, limit)

    losses = lost
    """The earlier name of `lost`."""

    def doctor(
        self, run: OptStr = None, attempt: OptInt = None, *, step: OptInt = None
    ) -> Diagnosis:
        """Diagnose a run by the rulebook: what is wrong, since when, and how sure that is.

        Usage:
            >>> session.doctor().found[0]["title"]

        Args:
            run: its name; default: the run whose training stage began last.
            attempt: only this attempt; default: the current attempts.
            step: use only the steps up to this one.
        """
        # A run whose canary alone reports has findings, and no step.
        name = self.get("/steps", limit=1)["run"] if run is None else run
        path = f"/runs/{segment(name, 'run')}/diagnosis"
        params = {"attempt": attempt, "step": step}
        return Diagnosis.from_table(self.table(path, params, noun="diagnosis"))

    def findings(
        self, run: OptStr = None, attempt: OptInt = None, *, only: OptStr = None, limit: int = LIMIT
    ) -> FindingRows:
        """Return the service's findings, one row each, the last seen first.

        They are displayed in `groups`: findings that repeat over steps and ranks are one group, and
        the most severe comes first.

        Args:
            run, attempt: only these.
            only: severities and patterns of kinds, joined by commas: `"error"`,
                `"streams_*,non_finite_operator"`.
            limit: most rows.

        Raises:
            NotFound: no finding has such a kind.
        """
        params = {"run": run, "attempt": attempt, "only": only}
        return self._findings_table("/findings", params, "findings", FINDING_ORDER, limit)

    def finding(self, finding_id: str) -> Finding:
        """Return one finding with its evidence, by its id or a prefix of the id.

        Raises:
            NotFound: there is none.
        """
        answer = self.get(f"/findings/{segment(finding_id, 'finding_id')}")
        return Finding(answer, link_text=self._link_text)

    def forward(
        self, run: str, to: str | Sequence[str], *, prefix: str = PREFIX,
        from_step: int = 0, anew: bool = False, page_url: OptStr = None, follow: bool = False,
        every: float = 5.0, report: Callable[[str], object] = print,
    ) -> Table:  # fmt: skip
        """Write a run's closed steps and findings into trackers that exist; see docs/trackers.md.

        Usage:
            >>> session.forward("qwen3-8b", to="tensorboard:runs/qwen3-8b")
            >>> session.forward("qwen3-8b", to=["mlflow:RUN_ID", "otlp:http://localhost:4318"])

        Args:
            run: its name.
            to: targets, `kind:address`: tensorboard, mlflow, wandb, swanlab, trackio, otlp.
            prefix: before each name that is written.
            from_step: the first step.
            anew: forget what was written to these targets, and write everything again.
            page_url: address under which readers open the service's page; default: this session's.
            follow: continue as steps close, until interrupted; otherwise write existing steps.
            every: seconds between two requests to the service.
            report: called with lines about problems, findings, steps that are written again, and,
                with `follow`, every step.

        Raises:
            InvalidInput: a target cannot be read.
            MissingExtra: a tracker's client is not installed.
            Conflict: another process forwards this run to a target.
        """
        from stagescope.forwarding import forwarder

        return forwarder.forward(
            self, run, [to] if isinstance(to, str) else to, prefix=prefix, from_step=from_step,
            anew=anew, page_url=page_url, every=every if follow else None, report=report,
        )  # fmt: skip

    def stuck(
        self, run: OptStr = None, attempt: OptInt = None, *, stage: OptStr = None,
        role: OptStr = None, rank: OptInt = None, limit: int = LIMIT,
    ) -> Stuck:  # fmt: skip
        """Return the ranks that hold up the others now, in the newest attempt of a run.

        If it has begun no step yet, `about["step"]` is None, and `about["note"]` says how long ago
        its last rank connected.
        """
        params = {
            "run": run, "attempt": attempt, "stage": stage, "role": role, "rank": rank,
        }  # fmt: skip
        return Stuck.from_table(
            self.table("/steps/latest/stuck", params, noun="stuck", limit=limit)
        )

    def stacks(
        self, run: OptStr = None, attempt: OptInt = None, *, role: OptStr = None,
        ranks: Sequence[int] | None = None, wait: float = 5.0,
    ) -> Stacks:  # fmt: skip
        """Request the stacks of all threads of live processes, also of blocked ones.

        Processes that answer within `wait` seconds (60 at most) are in `rows`; `not_answered` lists
        the others. The answers are stored: see `Step.stacks`.

        Raises:
            Forbidden: the token allows only reading.
            NotFound: there is no such run or attempt, or it has ended.
        """
        only = None if ranks is None else [*ranks]
        body = given(run=run, attempt=attempt, role=role, ranks=only, wait=wait)
        timeout = wait + self._transport.timeout
        answer = self._transport.change("POST", "/stacks", body, timeout=timeout)
        return Stacks(answer, title=f"stacks of {answer['run']}, attempt {answer['attempt']}")

    def engines(self, *, check: bool = False, limit: int = LIMIT) -> Table:
        """Return the registered inference engines and the last answer of each.

        With `check` the service first requests each engine's health path (timeout: 2 s).
        """
        params = {"check": "true" if check else None}
        return self.table("/engines", params, noun="engines", limit=limit)

    def engine(
        self, name: str, *, key_file: str | Path | None = None, timeout: float = 120.0
    ) -> HttpEngine:
        """Connect to a registered engine; see `stagescope_wire.engines`.

        Args:
            name: the name under which it is registered.
            key_file, timeout: as `stagescope_wire.engines.connect`.

        Raises:
            NotFound: no engine has this name.
            EngineError: it does not answer, or is no longer an inference engine.
        """
        from stagescope_wire.engines import connect

        row = self.get(f"/engines/{segment(name)}")
        return connect(str(row["url"]), key_file=key_file, timeout=timeout)

    def add_engine(
        self, url: str, *, name: OptStr = None, kind: OptStr = None, model: OptStr = None,
        version: OptStr = None, run: OptStr = None, note: OptStr = None,
        settings: JsonObject | None = None,
    ) -> Record:  # fmt: skip
        """Register an engine with the service; needs the operate token.

        Args:
            url: `http://HOST:PORT`, or HOST:PORT.
            name: the default is host and port.
            kind: `vllm`, `sglang`, `llama.cpp` or `openai`.
            model: what it serves.
            version: of the engine.
            run: the run that uses it.
            note: anything that people should know of it.
            settings: what it said of itself.
        """
        from stagescope_wire.engines.http import engine_url

        body = given(
            url=engine_url(url), name=name, kind=kind, model=model, version=version, run=run,
            note=note, settings=settings,
        )  # fmt: skip
        answer = self._transport.change("POST", "/engines", body)
        return Record(answer or {}, title="registered engine")

    def remove_engine(self, name: str) -> Record:
        """Remove an engine from the registry; the engine itself keeps running.

        Raises:
            NotFound: no engine has this name.
        """
        answer = self._transport.change("DELETE", f"/engines/{segment(name)}")
        return Record(answer or {"name": name}, title="engine, no longer registered")

    def _check_measured(self, latest: Step, attempt: int | None) -> None:
        """Check that a step has numbers, which is the latest if no closed one has any.

        Raises:
            NotFound: it has none; so no step of the run, or of the requested attempt, has.
        """
        try:
            latest.metrics()  # an open step has the numbers that arrived so far
        except NotFound as error:
            target = f"run {latest.run}" + ("" if attempt is None else f", attempt {attempt},")
            raise NotFound(
                f"no step of {target} has numbers; the latest: {error.wrong}",
                expected=error.expected, advice=error.advice, see=error.see,
                link_text=error.link_text,
            ) from error  # fmt: skip

    def _run_path(self, run: str | None) -> str:
        """Return the path of a run; None: the most recently active one."""
        if run is None:
            runs = self.runs(limit=1)
            if not len(runs):
                runs = self.runs(hidden=True, limit=1)
            if not len(runs):
                raise NotFound("the service has no run yet", advice="start a training that reports")
            run = str(runs[0]["run"])
        return f"/runs/{segment(run, 'run')}"
