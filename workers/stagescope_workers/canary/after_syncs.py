"""A canary in a training: asks the engine in the background, scores in the calling thread."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from stagescope_wire.canary import FIXED, Arm, Canary
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import Json
from stagescope_workers.canary.engine_arms import Question, Scorer, Stop, ask
from stagescope_workers.canary.sequences import Row

_log = logging.getLogger("stagescope.workers")

TIMEOUT: Final = 60.0
"""Seconds after which an engine is not asked any further for a version."""

TrainerScores: TypeAlias = Callable[[Sequence[Row]], Sequence[Sequence[float]] | None]
"""Returns the log-probs of each row, for each token or for the last ones, at temperature 1; None
on a rank that has none."""


class Reports(Protocol):
    """The probe of a canary."""

    @property
    def rank(self) -> int:
        """The rank in its role."""
        ...

    @property
    def step(self) -> int | None:
        """The step of the stage that is open, or was last; None: no stage has a step."""
        ...

    def guard(self, call: str, work: None) -> AbstractContextManager[None]:
        """Catch and report any exception, unless the probe is strict."""
        ...

    def report_canary(self, found: Canary, version: int, step: int | None) -> None:
        """Queue a CANARY event."""
        ...


class NamedEngine(NamedTuple):
    """An engine that is opened in the background.

    Attributes:
        name: of the instance.
        open: connects to it for one version; may take as long as its own deadline allows.
    """

    name: str
    open: Callable[[], AbstractContextManager[Scorer]]


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    version: int
    step: int | None
    began: float
    question: Question


class WeightCanary:
    """Scores fixed sequences after weight syncs; made by `Probe.canary`.

    Every method returns at once except `score`, which runs the trainer's model. None raises,
    unless the probe is strict.
    """

    def __init__(
        self, probe: Reports, question: Question, engines: Sequence[NamedEngine], every: int
    ) -> None:
        if type(every) is not int or every < 1:
            raise InvalidInput(f"every is {every!r:.50}", expected="a number of versions from 1")
        if len({engine.name for engine in engines}) < len(engines):
            raise InvalidInput("two engines have the same name", expected="a name for each")
        self._probe = probe
        self._question = question
        self._every = every
        self._engines = [_AskedEngine(probe, each) for each in engines]
        self._scored: int | None = None
        self.sequences = question.sequences

    def before_sync(self, why: str = "the next sync began") -> None:
        """Say that the weights are about to change: an answer that is not complete is dropped.

        Args:
            why: the beginning of the event's problem; "the engine was put to sleep".
        """
        with self._probe.guard("canary", None):
            for engine in self._engines:
                engine.supersede(why)

    def after_sync(
        self, version: int, step: int | None = None, *, adapter: str | None = None
    ) -> None:
        """Ask each engine in a background thread; call it where the engine has new weights.

        Args:
            version: the policy version that the engine serves from now on.
            step: the trainer's step; None: that of the open stage, or of the last one.
            adapter: the name of this version's adapter, where each version has another one.
        """
        with self._probe.guard("canary", None):
            if version % self._every == 0:
                step = self._probe.step if step is None else step
                question = self._question
                if adapter is not None:
                    question = question._replace(adapter=adapter)
                for engine in self._engines:
                    engine.ask(_Asked(version, step, time.monotonic(), question))

    def score(self, version: int, model: Any, step: int | None = None) -> None:
        """Score the sequences with the trainer's weights, in this thread, once a version.

        Where the model is sharded, call it on all its ranks at the same place. Rank 0 reports.

        Args:
            version: the policy version of these weights.
            model: a torch model that is called as transformers' causal models are, or a function
                (see `TrainerScores`).
            step: the trainer's step; None: that of the open stage, or of the last one.
        """
        with self._probe.guard("canary", None):
            if not self.sequences.rows or version % self._every or version == self._scored:
                return
            self._scored = version
            step = self._probe.step if step is None else step
            began = time.monotonic()
            rows = self.sequences.rows
            found = _trainer_scores(model, rows)
            if found is None or self._probe.rank != 0:
                return
            values, settings = found
            seconds = time.monotonic() - began
            _log.info("canary of version %d: %d tokens in %.3f s", version, self.sequences.tokens,
                      seconds)  # fmt: skip
            self._probe.report_canary(
                Canary(
                    side="trainer",
                    source="",
                    arms={FIXED: Arm(rows, values)},
                    settings={
                        "temperature": self._question.temperature,
                        "tokens": self.sequences.tokens,
                        "note": self.sequences.note,
                        **settings,
                    },
                    seconds=seconds,
                ),
                version,
                step,
            )

    def wait(self, timeout: float = TIMEOUT) -> bool:
        """Wait until the engines have answered; return whether they have. Not for a training."""
        deadline = time.monotonic() + timeout
        return all(engine.wait(deadline - time.monotonic()) for engine in self._engines)


class _AskedEngine:
    """One engine, and the thread that asks it; only the newest version waits for it."""

    def __init__(self, probe: Reports, engine: NamedEngine) -> None:
        self._probe = probe
        self._name, self._open = engine
        self._lock = threading.Lock()
        self._newest: _Asked | None = None
        self._thread: threading.Thread | None = None

    def supersede(self, why: str) -> None:
        """Drop the answer that is not complete, and report that it was dropped."""
        with self._lock:
            asked, self._newest = self._newest, None
        if asked is not None:
            seconds = time.monotonic() - asked.began
            problem = f"{why} {seconds:.1f} s after this one, before the engine had answered"
            self._report(self._empty(problem, seconds), asked)

    def ask(self, asked: _Asked) -> None:
        """Ask for a version, in place of an earlier one."""
        self.supersede(f"the sync of version {asked.version} ended")
        with self._lock:
            self._newest = asked
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="stagescope-canary", daemon=True
                )
                self._thread.start()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is asked any more; return whether that is so."""
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, timeout))
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._lock:
                asked = self._newest
                if asked is None:
                    self._thread = None
                    return
            found = self._ask(asked)
            with self._lock:
                is_newest = self._newest is asked
                if is_newest:
                    self._newest = None
            if is_newest:  # else it was reported as dropped
                self._report(found, asked)

    def _ask(self, asked: _Asked) -> Canary:
        def stop() -> Stop | None:
            if self._newest is not asked:
                return Stop("", is_stale=True)
            if time.monotonic() - asked.began > TIMEOUT:
                return Stop(f"the engine did not answer within {TIMEOUT:g} s", is_stale=False)
            return None

        try:
            with self._open() as scorer:
                return ask(scorer, asked.question, stop)
        except Exception as error:
            seconds = time.monotonic() - asked.began
            return self._empty(f"the engine cannot be asked: {error!s:.500}", seconds)

    def _report(self, found: Canary, asked: _Asked) -> None:
        self._probe.report_canary(found, asked.version, asked.step)

    def _empty(self, problem: str, seconds: float) -> Canary:
        return Canary("engine", self._name, arms={}, seconds=seconds, problem=problem)


def _trainer_scores(
    model: Any, rows: tuple[Row, ...]
) -> tuple[tuple[tuple[float, ...], ...], Mapping[str, Json]] | None:
    """Return the log-probs of a model or a function, and settings; None if it returned none."""
    from stagescope_workers.canary import trainer_scores  # torch

    if not hasattr(model, "named_parameters"):
        given = model(rows)
        if given is None:
            return None
        values = tuple(map(trainer_scores.tail, given, rows))
        if len(values) != len(rows) or len(given) != len(rows):
            raise InvalidInput(
                f"{len(given)} rows of log-probs for {len(rows)} sequences",
                expected="the log-probs of each sequence",
            )
        return values, {}
    scores = trainer_scores.score_with_model(model, rows)
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    settings: dict[str, Json] = {"dtype": dtype} if dtype else {}
    is_zero = trainer_scores.adapter_is_zero(model)
    if is_zero is not None:
        settings["adapter_is_zero"] = is_zero
    return tuple(scores), settings
