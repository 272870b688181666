"""A service under load for long, with kills at random moments, held to a journal of its ranks.

    python -m tests.tools.soak [MINUTES [STEPS_PER_SECOND [SEED]]]

Two ranks with the real probe train in a Ray cluster; each writes down what it handed over in each
step, and up to which step everything had its receipt. In the first part of the time processes are
killed with SIGKILL: the coordinator, the ingestor, the API, and the job itself, which resumes as
the run's next attempt. The rest is calm. In the end every step that was acknowledged must have
exactly the tokens and the mean |p - q| of the journal: nothing lost, nothing twice. Memory,
descriptors and threads of each process, the catalogue's WAL, the ring and the object store are
sampled.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import psutil
import ray
from tests.support.cluster import Service, answer, eventually, kill, ray_cluster

RUN: Final = "soak"
METRICS: Final = ("counts/tokens", "logprob_abs_diff/mean")
WINDOW: Final = 2000
"""Steps of one question for a series."""
ROUGH: Final = 0.6
"""Share of the time in which processes are killed."""
SAMPLE_SECONDS: Final = 2.0
MB: Final = 1 << 20
RANKS: Final = 2
KINDS: Final = 4
"""Of what is killed."""


@dataclasses.dataclass(frozen=True)
class Line:
    """What a rank wrote of a step."""

    attempt: int
    rank: int
    step: int
    tokens: int
    abs_sum: float
    """Sum of |p - q|, nats."""
    acknowledged: int
    """The newest step whose events and payloads, and those of all before it, had receipts."""


def _trainer() -> Any:
    """Return the class by value: the actor's process cannot import the tests."""

    class Trainer:
        """A rank that trains at a pace and keeps a journal."""

        def __init__(self, run: str, rank: int, attempt: int, resumed: int, journal: str) -> None:
            from stagescope_workers import init

            self.rank, self.attempt, self.step = rank, attempt, resumed
            self.acknowledged = resumed
            self.journal = open(journal, "a")  # noqa: SIM115 - until the process is killed
            self.probe = init(
                run=run, role="actor", rank=rank, world_size=2, attempt_key=f"a{attempt}",
                resumed_from_step=resumed or None,
            )  # fmt: skip

        def pid(self) -> int:
            """Return the process id."""
            return os.getpid()

        def train(self, steps: int, seconds: float) -> int:
            """Do some steps, each `seconds` after the last; return the last one's number."""
            begun = time.monotonic()
            for number in range(steps):
                self.step += 1
                time.sleep(max(0.0, begun + number * seconds - time.monotonic()))
                rng = np.random.default_rng(1000 * self.step + self.rank)
                q = -rng.random((2, 4 + self.step % 13), np.float32)
                p = q + rng.normal(0.0, 0.02, q.shape).astype(np.float32)
                with self.probe.stage("actor_compute_log_prob", step=self.step) as stage:
                    stage.record(
                        rollout_log_probs=q, old_log_probs=p, response_mask=np.ones_like(q),
                        sample_ids=[f"{self.step}-{self.rank}-{row}" for row in range(2)],
                    )  # fmt: skip
                with self.probe.stage("actor_update", step=self.step) as stage:
                    stage.log(loss=float(self.step))
                # As a checkpoint would, it waits at times: at this pace something is always sent.
                if self._is_settled(0.5 if self.step % 20 == 0 else 0.0):
                    self.acknowledged = self.step
                abs_sum = float(np.abs(p.astype(np.float64) - q).sum())
                line = (self.attempt, self.rank, self.step, q.size, abs_sum, self.acknowledged)
                self.journal.write(json.dumps(line) + "\n")
                self.journal.flush()
            return self.step

        def _waiting(self) -> int:
            status = self.probe.status()
            return int(status["waiting_events"]) + int(status["waiting_payloads"])

        def _is_settled(self, seconds: float) -> bool:
            until = time.monotonic() + seconds
            while self._waiting():
                if time.monotonic() >= until:
                    return False
                time.sleep(0.01)
            return True

        def settle(self, seconds: float) -> bool:
            """Wait until everything has its receipt; write it down."""
            if not self._is_settled(seconds):
                return False
            line = (self.attempt, self.rank, self.step, 0, 0.0, self.step)
            self.journal.write(json.dumps(line) + "\n")
            self.journal.flush()
            return True

        def status(self) -> dict[str, Any]:
            """Return what the probe says of itself."""
            return dict(self.probe.status())

        def leave(self) -> tuple[bool, dict[str, int]]:
            """Take leave; return whether all arrived, and what was dropped."""
            self.probe.end_step(self.step)
            return self.probe.close(60.0), self.probe.status()["dropped"]

    return Trainer


@dataclasses.dataclass
class Attempt:
    """The ranks of one start of the job."""

    number: int
    resumed: int
    ranks: list[Any]
    training: list[Any]

    def kill(self) -> None:
        """Kill -9 its processes."""
        for each in self.ranks:
            with contextlib.suppress(Exception):
                kill(int(answer(each.pid.remote())))


@dataclasses.dataclass(frozen=True)
class Report:
    """What a soak found."""

    steps: int
    """Steps that were acknowledged by every rank."""
    attempts: int
    rate: float
    """Steps a second that the job did, its starts and its waits included."""
    kills: dict[str, int]
    wrong: list[str]
    """Steps that differ from the journal."""
    grown: list[str]
    """What grew in the calm part, by more than its noise."""
    figures: list[str]
    """Lines for a reader."""


class Soak:
    """The job, the service, and who harms them.

    Args:
        service: with short leases.
        directory: of the journals.
        pace: seconds between two steps.
        seed: of the moments of the kills.
    """

    def __init__(self, service: Service, directory: Path, pace: float, seed: int) -> None:
        self.service = service
        self.directory = directory
        self.pace = pace
        self.random = random.Random(seed)
        self.kills: collections.Counter[str] = collections.Counter()
        self.samples: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        """Name of a measure -> (time, value)."""
        self.attempt = self._start(1, 0)
        self.done = 0
        self.seconds = self.calm_from = 0.0

    # --- the job ----------------------------------------------------------------------------
    def _start(self, number: int, resumed: int) -> Attempt:
        made = ray.remote(_trainer()).options(num_cpus=0, max_restarts=0, max_task_retries=0)
        ranks = [
            made.remote(RUN, rank, number, resumed, str(self._journal(number, rank)))
            for rank in range(RANKS)
        ]
        return Attempt(number, resumed, ranks, [])

    def _journal(self, number: int, rank: int) -> Path:
        return self.directory / f"{number}-{rank}.jsonl"

    def lines(self, names: str = "*.jsonl") -> Iterator[Line]:
        """Yield what the ranks have written."""
        for path in sorted(self.directory.glob(names)):
            for text in path.read_text().splitlines(keepends=True):
                if text.endswith("\n"):
                    yield Line(*json.loads(text))

    def resume(self) -> None:
        """Kill the job and start it again from what all of its ranks had acknowledged."""
        self.attempt.kill()
        self.attempt = self._start(self.attempt.number + 1, self._acknowledged())

    def _acknowledged(self) -> int:
        """Return the newest step of this attempt of which every rank has every receipt."""
        number = self.attempt.number
        acknowledged = [0] * RANKS
        for line in self.lines(f"{number}-*.jsonl"):
            acknowledged[line.rank] = max(acknowledged[line.rank], line.acknowledged)
        return min(acknowledged)

    # --- time -------------------------------------------------------------------------------
    def run(self, seconds: float, kill_every: float) -> None:
        """Train for a while; kill something every so often on average, in the first part."""
        batch = max(1, round(1.0 / self.pace))
        began = time.monotonic()
        rough, calm = ROUGH * seconds, (1.0 - ROUGH) * seconds
        self.calm_from = math.inf
        next_kill = began + kill_every / 2
        next_sample = began
        kinds = kinds_of_harm(self.random)
        while (now := time.monotonic()) - began < self.calm_from + calm:
            if now - began > rough and len(self.kills) == KINDS and self.calm_from == math.inf:
                self.calm_from = now - began
            if not self.attempt.training:
                self.attempt.training = [
                    each.train.remote(batch, self.pace) for each in self.attempt.ranks
                ]
            is_rough = self.calm_from == math.inf
            if is_rough and next_kill <= now and self._acknowledged() > self.attempt.resumed:
                self.harm(next(kinds))
                next_kill = time.monotonic() + self.random.uniform(0.5, 1.5) * kill_every
            if next_sample <= now:
                self.sample(now - began)
                next_sample = now + SAMPLE_SECONDS
            done, _ = ray.wait(self.attempt.training, num_returns=RANKS, timeout=0.2)
            if len(done) == RANKS:
                answer(done)
                self.done += batch
                self.attempt.training = []
        answer(self.attempt.training)
        self.seconds = time.monotonic() - began

    def harm(self, kind: str) -> None:
        """Kill -9 one process, or the job."""
        self.kills[kind] += 1
        if kind == "job":
            self.resume()
            return
        with contextlib.suppress(Exception):  # it is being made anew at the moment
            self.service.kill(kind)

    def sample(self, at: float) -> None:
        """Measure the service's processes, its files and the object store."""
        for which in ("coordinator", "api", "ingestor"):
            with contextlib.suppress(Exception):  # it is being made anew at the moment
                process = psutil.Process(self.service.pid(which))
                self._add(which, at, "memory, MB", process.memory_info().rss / MB)
                self._add(which, at, "descriptors", process.num_fds())
                self._add(which, at, "threads", process.num_threads())
        data = self.service.settings.data_path
        wal = data / "catalogue.db-wal"
        if wal.exists():
            self._add("WAL", at, "MB", wal.stat().st_size / MB)
        files = [path for path in (data / "ring").rglob("*") if path.is_file()]
        with contextlib.suppress(OSError):
            self._add("ring", at, "MB", sum(path.stat().st_size for path in files) / MB)
        self._add("catalogue", at, "MB", (data / "catalogue.db").stat().st_size / MB)
        self._add("object store", at, "MB", _object_store_bytes() / MB)

    def _add(self, what: str, at: float, unit: str, value: float) -> None:
        self.samples[f"{what}, {unit}"].append((at, value))

    # --- the end ----------------------------------------------------------------------------
    def report(self) -> Report:
        """End the job, and hold the service's answers to the journal."""
        for each in self.attempt.ranks:
            assert answer(each.settle.remote(120.0), 180.0), self._what_waits()
        left = [answer(each.leave.remote(), 120.0) for each in self.attempt.ranks]
        assert all(ok and not dropped for ok, dropped in left), left
        expected = self.expected()
        wrong: list[str] = []
        for number, steps in expected.items():
            found = eventually(functools.partial(self._read, number, steps), 180.0)
            for step, (tokens, mean) in steps.items():
                got = found.get(step, (None, None))
                same = got[0] == tokens and got[1] is not None and abs(got[1] - mean) < 1e-9
                if not same:
                    wrong.append(f"attempt {number}, step {step}: {got} of {(tokens, mean)}")
        return Report(
            steps=sum(map(len, expected.values())),
            attempts=len(expected),
            rate=self.done / self.seconds,
            kills=dict(self.kills),
            wrong=wrong,
            grown=self.grown(),
            figures=self.figures(),
        )

    def _what_waits(self) -> str:
        ranks = [answer(each.status.remote()) for each in self.attempt.ranks]
        with self.service.session() as session:
            return f"receipts are missing: {ranks}, {session.status()['coordinator']}"

    def expected(self) -> dict[int, dict[int, tuple[int, float]]]:
        """Return attempt -> step -> tokens and mean |p - q| of what every rank had acknowledged."""
        acknowledged: dict[tuple[int, int], int] = collections.defaultdict(int)
        sums: dict[tuple[int, int], list[Line]] = collections.defaultdict(list)
        for line in self.lines():
            key = (line.attempt, line.rank)
            acknowledged[key] = max(acknowledged[key], line.acknowledged)
            if line.tokens:
                sums[line.attempt, line.step].append(line)
        found: dict[int, dict[int, tuple[int, float]]] = collections.defaultdict(dict)
        for (attempt, step), lines in sums.items():
            until = min(acknowledged[attempt, rank] for rank in range(RANKS))
            if step <= until and len(lines) == RANKS:
                tokens = sum(line.tokens for line in lines)
                found[attempt][step] = (tokens, sum(line.abs_sum for line in lines) / tokens)
        return found

    def _read(
        self, number: int, steps: dict[int, tuple[int, float]]
    ) -> dict[int, tuple[float | None, float | None]] | None:
        """Return step -> numbers of the service; None while some are not computed."""
        found: dict[int, list[float | None]] = collections.defaultdict(lambda: [None, None])
        first, last = min(steps), max(steps)
        headers = {"Authorization": f"Bearer {self.service.token}"}
        with httpx.Client(base_url=self.service.info.url, headers=headers, timeout=60.0) as client:
            for at, metric in enumerate(METRICS):
                for begin in range(first, last + 1, WINDOW):
                    asked: dict[str, str | int] = {
                        "metric": metric, "run": RUN, "attempt": number, "superseded": "true",
                        "from": begin, "to": min(begin + WINDOW - 1, last), "limit": WINDOW,
                    }  # fmt: skip
                    said = client.get("/series", params=asked).raise_for_status().json()
                    values = said["series"][0]["values"] if said["series"] else []
                    for step, value in zip(said["steps"], values, strict=False):
                        found[step][at] = value
        # What is written after a kill is aggregated soon after; what is lost, never.
        missing = [step for step in steps if found[step][0] is None]
        if missing and len(missing) < len(steps) and self._is_working():
            return None
        return {step: (each[0], each[1]) for step, each in found.items()}

    def _is_working(self) -> bool:
        with self.service.session() as session:
            return bool(session.status()["coordinator"]["pending_payloads"])

    def grown(self) -> list[str]:
        """Return what grew in the calm part: its last third against its first."""
        found = []
        for name, samples in self.samples.items():
            values = [value for at, value in samples if at >= self.calm_from]
            third = len(values) // 3
            if third < 5 or name.startswith("catalogue"):
                continue
            first, last = statistics.median(values[:third]), statistics.median(values[-third:])
            room = 0.15 * first + (25.0 if name.endswith("MB") else 8.0)
            if "memory" in name:
                room = 20.0  # what fills up to a bound, and what a trim has not returned yet
            if last > first + room:
                found.append(f"{name}: {first:.0f} -> {last:.0f}")
        return found

    def figures(self) -> list[str]:
        """Return a line for each measure: median of the calm part's thirds, and the largest."""
        lines = []
        for name, samples in sorted(self.samples.items()):
            calm = [value for at, value in samples if at >= self.calm_from] or [samples[-1][1]]
            third = max(1, len(calm) // 3)
            first, last = statistics.median(calm[:third]), statistics.median(calm[-third:])
            most = max(value for _, value in samples)
            lines.append(f"{name:<26} calm {first:7.1f} -> {last:7.1f}, largest {most:7.1f}")
        return lines


def kinds_of_harm(chance: random.Random) -> Iterator[str]:
    """Yield what to kill: each kind as often as the others, in random order."""
    while True:
        kinds = ["coordinator", "ingestor", "api", "job"]
        chance.shuffle(kinds)
        yield from kinds


def _object_store_bytes() -> float:
    from ray._private.internal_api import node_stats

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    (node,) = [each for each in nodes if each["Alive"]]
    stats: Any = node_stats(  # type: ignore[no-untyped-call]
        node["NodeManagerAddress"], node["NodeManagerPort"], False
    )
    return float(stats.store_stats.object_store_bytes_used)


def soak(seconds: float, *, steps_per_second: float, kill_every: float, seed: int) -> Report:
    """Run one in a cluster of its own."""
    with ray_cluster() as address, tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "journals").mkdir()
        service = Service.start(
            root / "home", address, data_dir=root / "data", ring_bytes=16 * MB,
            keep_steps=400, keep_row_steps=800,
        )  # fmt: skip
        try:
            running = Soak(service, root / "journals", 1.0 / steps_per_second, seed)
            running.run(seconds, kill_every)
            return running.report()
        finally:
            service.stop()


def main(minutes: float = 60.0, steps_per_second: float = 20.0, seed: float = 1.0) -> int:
    """Print what a soak found; return 1 if something was wrong."""
    report = soak(
        60.0 * minutes, steps_per_second=steps_per_second, kill_every=min(60.0, 6.0 * minutes),
        seed=int(seed),
    )  # fmt: skip
    kills = ", ".join(f"{kind} {count}" for kind, count in sorted(report.kills.items()))
    is_wrong = bool(report.wrong or report.grown)
    lines = [
        f"{report.steps} steps acknowledged, {report.attempts} attempts, {report.rate:.1f}/s",
        f"killed: {kills}",
        *report.figures,
        *(f"WRONG  {text}" for text in report.wrong[:20]),
        *(f"GREW   {text}" for text in report.grown),
        "failed" if is_wrong else "nothing lost, nothing twice, nothing grew",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:])))
