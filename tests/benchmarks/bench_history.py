"""What a long history costs: answers, a restart, bytes and retention after many steps of 64 ranks.

    python -m tests.benchmarks.bench_history [STEPS [RANKS]]

It makes two catalogues of a run whose ranks still live, one of 100 steps and one of STEPS, of four
stages a rank and step (`tests.support.runs.long`). Both services are asked in turns; ratios are of
CPU time, which says something on a busy machine, too. Then coordinators are opened on each, until
they have taken in a batch; and last, rows of old steps are removed from the long one while ranks go
on.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

import numpy as np
from tests.support.api import Rank, Report, Service, service
from tests.support.ingestors import LocalIngestors
from tests.support.runs.long import RUN, SCALARS, LongRun, train_long

from stagescope_service.coordinator.coordinator import Coordinator
from stagescope_service.core.instructions import Aggregate
from stagescope_service.http.app import make_app
from stagescope_service.http.server import ApiServer
from stagescope_service.ingest.ingestors import IngestWorker
from stagescope_service.settings import Settings
from stagescope_service.statistics.summarise import warm
from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.sql import SqlStore
from stagescope_service.views.reading.dependencies import Commands
from stagescope_wire import schema

SHORT: Final = 100
"""Steps of the run that the long one is compared with."""
OLD: Final = 10
ROUNDS: Final = 30
RESTARTS: Final = 3
STREAM: Final = "a reading of /stream"
"""Of the catalogue alone: once a second, for all listeners."""
BATCHES: Final = 250
"""Batches whose waits are shown while nothing else is done."""
K3: Final = "rollout_corr/k3_kl"
PATIENCE: Final = 300.0
"""Seconds after which an answer has failed."""
MOST: Final = 1.2
"""Ratio up to which an answer counts as independent of the number of steps."""


# --- answers ----------------------------------------------------------------------------------
def bounded(newest: int) -> dict[str, str]:
    """Return name -> path of what should not depend on the number of steps."""
    series = f"/series?metric={K3}&from={newest - 99}&limit=100"
    found = {
        "/healthz": "/healthz",
        STREAM: "",
        "/status": "/status",
        "/metrics": "/metrics",
        "/runs": "/runs",
        "attempts of the run": f"/runs/{RUN}/attempts",
        "/steps, newest 50": "/steps",
        "/steps, 50 up to an old one": f"/steps?to={OLD + 50}",
        "series, newest 100": series,
        "series by rank, newest 100": f"{series}&by=rank",
        "scalar, newest 100": f"/series?metric=loss&from={newest - 99}&limit=100",
        "metrics of the latest step": "/steps/latest/metrics",
        "names of numbers": f"/runs/{RUN}/metrics",
        "findings, newest 50": "/findings",
        "figure rank-steps, newest 100": f"/figures/rank-steps?from={newest - 99}",
        "figure overview, newest 100": f"/figures/overview?from={newest - 99}",
    }
    of_step = {
        "metrics": "", "rounds": "", "ranks": "limit=1000", "tokens": "limit=64",
        "stages": "limit=500", "scalars": "limit=1000", "samples": "limit=100",
    }  # fmt: skip
    for name, step in (("newest", newest), ("old", OLD)):
        found |= {f"{each} of the {name} step": f"/steps/{step}/{each}?{query}"
                  for each, query in of_step.items()}  # fmt: skip
        found[f"findings of the {name} step"] = f"/findings?step={step}&run={RUN}"
        found[f"losses of the {name} step"] = f"/losses?step={step}&run={RUN}"
        found[f"figure timeline of the {name} step"] = f"/figures/timeline?step={step}"
    return found


def growing() -> dict[str, str]:
    """Return name -> path of what is of all steps, by its nature."""
    return {
        "series of all steps": f"/series?metric={K3}",
        "scalar of all steps": "/series?metric=loss",
        "figure overview": "/figures/overview",
        "findings, by kind": "/findings/groups",
        "exact": "/exact",
        "diagnosis": f"/runs/{RUN}/diagnosis",
    }


class Cost(NamedTuple):
    """What a question costs, in seconds."""

    wall: float
    cpu: float
    """Of this process: of service and client."""


def asked(live: Service, path: str) -> Cost:
    """Ask a question; without a path, what listeners of `/stream` cost."""
    began, used = time.perf_counter(), time.process_time()
    if path:
        answer = live.read.get(path, timeout=PATIENCE)
        assert answer.status_code == 200, f"{path}: {answer.text}"
    else:
        live.catalogue.recent(time.time())
    return Cost(time.perf_counter() - began, time.process_time() - used)


def compare_answers(short: Service, long: Service, steps: int) -> None:
    """Print how long each answer takes at few and at many steps."""
    paths = {name: (at_few, at_many) for (name, at_few), at_many in
             zip(bounded(SHORT).items(), bounded(steps).values(), strict=True)}  # fmt: skip
    say(f"\nanswers: ms, median and p99 of {ROUNDS}; the first; medians of CPU time")
    say(f"{'':36}{SHORT:>8} steps{'':7}{steps:>8} steps{'':4}first{'CPU':>8}{'CPU':>8}   ratio")
    first = {name: asked(long, at_many) for name, (_, at_many) in paths.items()}
    costs: dict[str, tuple[list[Cost], list[Cost]]] = {name: ([], []) for name in paths}
    for _ in range(ROUNDS):
        for name, (at_few, at_many) in paths.items():
            costs[name][0].append(asked(short, at_few))
            costs[name][1].append(asked(long, at_many))
    for name, both in costs.items():
        walls = [percentiles([cost.wall for cost in each]) for each in both]
        few, many = (statistics.median(cost.cpu for cost in each) for each in both)
        mark = "  <- above" if many > MOST * few else ""
        say(
            f"{name:36}{''.join(walls)}{1e3 * first[name].wall:9.1f}{1e3 * few:8.1f}"
            f"{1e3 * many:8.1f}{many / few:8.2f}{mark}"
        )
    say("\nanswers that are of all steps, by their nature: ms of CPU, the first and the least of 3")
    for name, path in growing().items():
        of_short, of_long = ([asked(live, path).cpu for _ in range(3)] for live in (short, long))
        low, high = min(of_short), min(of_long)
        each = 1e6 * (high - low) / (steps - SHORT)
        say(
            f"{name:36}{1e3 * of_short[0]:9.1f}{1e3 * low:9.1f}{'':8}{1e3 * of_long[0]:9.1f}"
            f"{1e3 * high:9.1f}{each:16.1f} us a further step"
        )


def percentiles(times: Sequence[float]) -> str:
    """Return the median and the 99th percentile in ms."""
    return f"{1e3 * statistics.median(times):9.1f}{1e3 * float(np.quantile(times, 0.99)):8.1f}"


# --- coordinators -----------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def coordinator_on(settings: Settings) -> AsyncIterator[Coordinator]:
    """A coordinator that goes on where the catalogue's last one ended."""
    store = SqlStore(settings.catalogue_url)
    await asyncio.to_thread(store.open)
    data, roots = settings.data_path, settings.roots
    ingestors = LocalIngestors(
        lambda node: IngestWorker(node, data, roots, ring_bytes=0), home="here"
    )
    coordinator = await Coordinator.open(settings, store, ingestors)
    yield coordinator
    await coordinator.parts.runner.settled()
    await asyncio.to_thread(store.close)
    ingestors.close()
    coordinator.parts.catalogue.close()


async def taken_in(coordinator: Coordinator, report: Report) -> float:
    """Return the seconds until a batch is committed."""
    began = time.perf_counter()
    answer = await coordinator.record_events(sender=report.sender.wire(), events=report.events)
    assert not answer["refused"], answer
    return time.perf_counter() - began


async def restarted(settings: Settings, rank: Rank, step: int) -> tuple[float, float]:
    """Return the seconds until a new coordinator has taken in a batch, and until all that its
    start began is done."""
    began = time.perf_counter()
    async with coordinator_on(settings) as coordinator:
        await taken_in(coordinator, rank.draft(schema.LOG, step=step, scalars={"restarts": 1.0}))
        took = time.perf_counter() - began
        await coordinator.parts.runner.settled()
        return took, time.perf_counter() - began


def restarts(settings: Settings, run: LongRun, steps: int) -> str:
    """Return how long some took."""
    rank = run.rank(None, 0, steps + 1)
    found = [asyncio.run(restarted(settings, rank, steps + 1)) for _ in range(RESTARTS)]
    took, done = zip(*found, strict=True)
    return (
        f"{statistics.median(took):6.2f} s until a batch is taken in (longest {max(took):.2f}), "
        f"{statistics.median(done):.2f} s until all is done that a start begins"
    )


def first_answer(live: Service) -> float:
    """Return the seconds from a new API's begin to its first answer about the newest step."""
    began = time.perf_counter()
    catalogue = Catalogue(live.settings.catalogue_url)
    app = make_app(
        catalogue=catalogue, commands=cast(Commands, live.engine), settings=live.settings,
        tokens=live.tokens,
    )  # fmt: skip
    server = ApiServer(app, port=0)
    server.start()
    client = live.client(live.tokens.read)
    answer = client.get(f"{server.url}/steps/latest/metrics")
    took = time.perf_counter() - began
    assert answer.status_code == 200, answer.text
    server.stop()
    catalogue.close()
    return took


# --- bytes ------------------------------------------------------------------------------------
def sizes(path: Path) -> dict[str, int]:
    """Return the bytes of the filled pages of a catalogue and of all, and its rows."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        page, pages, free = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_size", "page_count", "freelist_count")
        )
        tables = ("stage_rows", "scalar_rows", "payload_rows", "samples", "summaries", "works")
        counts = (f"SELECT count(*) FROM {name}" for name in tables)
        rows = sum(connection.execute(each).fetchone()[0] for each in counts)
    return {"bytes": (pages - free) * page, "file": pages * page, "rows": rows}


def bytes_by_table(path: Path) -> dict[str, int]:
    """Return the bytes of each table and index; {} where SQLite has no dbstat."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        try:
            each = "SELECT name, sum(pgsize) FROM dbstat WHERE aggregate = 1 GROUP BY name"
            return dict(connection.execute(each).fetchall())
        except sqlite3.OperationalError:
            return {}


# --- retention --------------------------------------------------------------------------------
class Training:
    """Ranks that go on: a batch is the begin and the end of one rank's next stage."""

    def __init__(self, run: LongRun, step: int) -> None:
        self._run = run
        self.go_to(step)

    def go_to(self, step: int) -> None:
        """Go on with the first stage of a step."""
        self._first, self._turn = step, 0
        self._ranks = [self._run.rank(None, rank, step) for rank in range(self._run.ranks)]

    @property
    def step(self) -> int:
        """The step in which the next batch is."""
        return self._first + self._turn // (len(self._ranks) * len(SCALARS))

    def report(self) -> Report:
        """Return the next batch."""
        stage = [*SCALARS][self._turn // len(self._ranks) % len(SCALARS)]
        found = self._ranks[self._turn % len(self._ranks)].draft_stage(stage, self.step)
        self._turn += 1
        return found

    async def go_on(self, coordinator: Coordinator, until: Awaitable[object]) -> list[float]:
        """Report a batch every 20 ms until something is done; return how many seconds each took."""
        done, waits = asyncio.ensure_future(until), list[float]()
        while True:
            waits += await self.go_through(coordinator, 1)
            if done.done():
                await done
                return waits

    async def go_through(self, coordinator: Coordinator, batches: int) -> list[float]:
        """Report some batches, one every 20 ms; return how many seconds each took."""
        waits = []
        for _ in range(batches):
            waits.append(await taken_in(coordinator, self.report()))
            await asyncio.sleep(0.02)
        return waits


async def remove_old(settings: Settings, run: LongRun, steps: int) -> None:
    """Remove rows of old steps while ranks go on; print waits, rows and bytes."""
    over = min(500, steps // 10)
    path, training = settings.data_path / "catalogue.db", Training(run, steps + 1)
    limits = {"keep_row_steps": steps - over, "keep_steps": over}
    async with coordinator_on(settings.model_copy(update=limits)) as coordinator:
        parts = coordinator.parts

        async def show(name: str, until: Awaitable[object] | None) -> None:
            began = time.perf_counter()
            waits = await (
                training.go_through(coordinator, BATCHES)
                if until is None
                else training.go_on(coordinator, until)
            )
            took, found = time.perf_counter() - began, sizes(path)
            say(
                f"{name:44}{took:7.1f} s{percentiles(waits)}{1e3 * max(waits):9.1f}"
                f"{found['rows']:12d}{found['bytes'] / 1e6:10.1f}{found['file'] / 1e6:10.1f}"
            )

        await show(f"statistics of parts: {over} steps are kept", parts.runner.settled())
        await show("nothing is removed", None)
        await show(f"rows: the oldest {over} steps go", parts.retention.remove_rows())
        for _ in range(2):
            more = range(training.step + 1, training.step + 1 + over)
            await asyncio.to_thread(run.extend, coordinator.parts.commits.store, more, keep=over)
            training.go_to(more.stop)
            parts.runner.start(Aggregate(1, more[-1]))
            await show(f"{over} steps later: statistics of parts", parts.runner.settled())
            await show("rows", parts.retention.remove_rows())


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(steps: int, ranks: int) -> None:
    """Print the figures."""
    warm()
    with tempfile.TemporaryDirectory() as place:
        homes = {number: Path(place) / str(number) for number in (SHORT, steps)}
        runs = {}
        for number, home in homes.items():
            began = time.perf_counter()
            runs[number] = train_long(home, number, ranks=ranks)
            say(f"{number} steps x {ranks} ranks made in {time.perf_counter() - began:.0f} s")
        measure(homes, runs, steps)


def measure(homes: Mapping[int, Path], runs: Mapping[int, LongRun], steps: int) -> None:
    """Measure two catalogues that are there; the long one loses its oldest steps."""
    paths = {
        number: Settings(home=home).data_path / "catalogue.db" for number, home in homes.items()
    }
    few, many = (sizes(paths[number]) for number in (SHORT, steps))
    further = (many["bytes"] - few["bytes"]) / (steps - SHORT)
    say(
        f"catalogue: {many['bytes'] / 1e6:.0f} MB, {many['bytes'] / steps / 1e3:.0f} KB a step, "
        f"from {SHORT} steps on {further / 1e3:.0f} KB"
    )
    for name, size in sorted(bytes_by_table(paths[steps]).items(), key=lambda each: -each[1])[:10]:
        say(f"{size / steps / 1e3:10.1f} KB a step  {name}")
    with (
        service(homes[SHORT], recorded=False, resumes=True) as short,
        service(homes[steps], recorded=False, resumes=True) as long,
    ):
        compare_answers(short, long, steps)
        say(
            "\nan API's begin to its first answer: "
            f"{first_answer(short):.2f} s at {SHORT}, {first_answer(long):.2f} s at {steps} steps"
        )
    for number in (SHORT, steps):
        took = restarts(Settings(home=homes[number], port=0), runs[number], number)
        say(f"a coordinator's start at {number:6d} steps: {took}")
    say(
        "\nretention, while ranks go on; ms that a batch waits for its commit: median, p99, longest"
    )
    heads = f"{'took':>9}{'median':>9}{'p99':>8}{'longest':>9}{'rows':>12}{'MB':>10}{'file':>10}"
    say(f"{'':44}{heads}")
    asyncio.run(remove_old(Settings(home=homes[steps], port=0), runs[steps], steps))


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*(given + [500, 64][len(given) :]))
