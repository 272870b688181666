"""Play a run with a fault to a service in this process, without HTTP, and ask its doctor."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from tests.service.rules.benchmark import scene as scenes
from tests.service.rules.benchmark.scene import Floats, Sampler, Scene, healthily, make_batch
from tests.service.rules.planted import STAGE, Batch, wire
from tests.support.api import LocalEngine, Rank, Report
from tests.support.stores import write

from stagescope_service.core.findings import finding
from stagescope_service.rules.document import defaults
from stagescope_service.settings import Settings
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.sql import SqlStore
from stagescope_service.views.diagnosis import diagnosis_of
from stagescope_service.views.reading.dependencies import Commands, Dependencies

Row = Mapping[str, Any]
"""A row of the doctor's answer."""
Scalars = dict[str, float]


class Bench:
    """A service in this process.

    Args:
        home: an empty folder.
    """

    def __init__(self, home: Path) -> None:
        settings = Settings(home=home, port=0)
        self._store = SqlStore(settings.catalogue_url)
        self._store.open()
        self._catalogue = Catalogue(settings.catalogue_url)
        self.engine = LocalEngine(self._store, settings)
        # Each service watches these from its start.
        asyncio.run(self.engine.set_triggers(document=defaults().wire(), by="bench"))
        self._deps = Dependencies.build(
            catalogue=self._catalogue, commands=cast(Commands, self.engine), settings=settings,
            clock=time.time,
        )  # fmt: skip

    def found(self, run: str, step: int | None = None) -> list[Row]:
        """Return the symptoms that the doctor finds up to a step, in its order."""
        _, rows = diagnosis_of(self._deps, run, None, step)
        return [row for row in rows if row["verdict"] == "found"]

    def report(self, run: str, kind: str, text: str, **fields: Any) -> None:
        """Let the service find something in the newest attempt of a run."""
        attempt_id = self._catalogue.attempts(run)[0]["attempt_id"]
        place: Any = {"run": run, "attempt_id": attempt_id, "wall": 1.0}
        write(self._store, finding(kind, text, **{**place, **fields}))

    def close(self) -> None:
        """Stop it."""
        self.engine.close()
        self._catalogue.close()
        self._store.close()


@dataclasses.dataclass
class Training:
    """A run while it is played."""

    bench: Bench
    run: str
    processes: list[Rank]


def _nothing(batch: Batch) -> None: ...


def _as_old(batch: Batch) -> Floats:
    """Return the old log-probs with the noise of another pass."""
    return batch.p + batch.random.normal(0.0, 1e-6, batch.p.shape)


def _as_logged(step: int, scalars: Scalars) -> Scalars:
    return scalars


def _as_timed(step: int, rank: int, seconds: float) -> float:
    return seconds


def _never(step: int, rank: int) -> bool:
    return False


def _no_event(training: Training, step: int) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in a run, and what the doctor should name.

    Attributes:
        kind: what it is a variant of.
        name: of the variant.
        causes: rules of which the first cause must be one; () where the run is healthy.
        why: why these are the cause.
        scene: the run without the fault.
        where: text that the place of the cause must have.
        second: rules of which another cause among the first three must be one.
        sample: how engines sample.
        change: what becomes of the rows of a rank and step.
        current: the log-probs of the update's first mini-batch.
        scalars: what becomes of the logged numbers of a step.
        seconds: what becomes of the time of a rank and step.
        absent: whether a rank does not report a step.
        skipped: steps that no rank reports.
        event: what happens after a step.
        hello: what ranks say at the begin of an attempt.
        keep: tensors that are kept.
        true: rules that may be found, since the healthy run has them.
    """

    kind: str
    name: str
    causes: frozenset[str]
    why: str
    scene: Scene
    where: str = ""
    second: frozenset[str] = frozenset()
    sample: Sampler = healthily
    change: Callable[[Batch], None] = _nothing
    current: Callable[[Batch], Floats] = _as_old
    scalars: Callable[[int, Scalars], Scalars] = _as_logged
    seconds: Callable[[int, int, float], float] = _as_timed
    absent: Callable[[int, int], bool] = _never
    skipped: frozenset[int] = frozenset()
    event: Callable[[Training, int], None] = _no_event
    hello: Callable[[int], Mapping[str, Any]] = lambda attempt: {}
    keep: tuple[str, ...] = ()
    true: frozenset[str] = frozenset()


_GAP: Final = 100_000.0
"""Seconds between the begins of attempts."""


def play(bench: Bench, run: str, fault: Fault) -> None:
    """Report a run with a fault, step by step."""
    scene = fault.scene
    bench.engine.keep(*fault.keep)
    begins = [1, *(restart.at for restart in scene.restarts)]
    ends = [*(restart.died_in for restart in scene.restarts), scene.steps]
    for attempt, (first, last) in enumerate(zip(begins, ends, strict=True), 1):
        processes = [
            Rank(None, run=run, rank=rank, key=f"a{attempt}", world_size=scene.ranks,
                 start=1_000.0 + _GAP * attempt, greets=False, **fault.hello(attempt))
            for rank in range(scene.ranks)
        ]  # fmt: skip
        training = Training(bench, run, processes)
        bench.engine.take_together([each.hello for each in processes])
        for step in range(first, last + 1):
            if step not in fault.skipped:
                _play_step(training, fault, step, attempt)
                fault.event(training, step)
        begun = [each.draft("begin", stage=STAGE, step=last + 1) for each in processes]
        bench.engine.take_together(begun)
    bench.engine.keep()
    scenes.forget()


def _play_step(training: Training, fault: Fault, step: int, attempt: int) -> None:
    scene = fault.scene
    reports: list[Report] = []
    scalars = fault.scalars(step, scenes.scalars_of(scene, step))
    present = [each for each in training.processes if not fault.absent(step, _rank(each))]
    for process in present:
        rank = _rank(process)
        batch = make_batch(scene, fault.sample, step, rank, attempt)
        fault.change(batch)
        fields: dict[str, object] = {"scalars": scalars} if scalars else {}
        if batch.versions is not None:
            fields["policy_version"] = step
        seconds = fault.seconds(step, rank, scenes.seconds_of(scene, step, rank))
        report = process.draft_stage(
            STAGE, step, wire(batch, training.run), seconds=seconds, **fields
        )
        more: list[Report] = []
        if scene.updates:
            payload = _of_update(batch, fault.current(batch), training.run)
            more.append(process.draft_stage("actor_update", step, payload, minibatch=0))
        if scene.syncs:
            more.append(process.draft_stage("weight_sync", step, seconds=0.3))
        for each in more:
            report = each._replace(
                events=report.events + each.events, payloads={**report.payloads, **each.payloads}
            )
        reports.append(report)
    training.bench.engine.take_together(reports)


def _rank(process: Rank) -> int:
    assert process.sender.rank is not None
    return process.sender.rank


def _of_update(batch: Batch, current: Floats, run: str) -> Mapping[str, Any]:
    payload = wire(batch, run)
    tensors = {name: payload["tensors"][name] for name in ("old_log_probs", "response_mask")}
    tensors["log_probs"] = ("float32", current.shape, current.astype("float32"), None)
    return {**payload, "tensors": tensors}
