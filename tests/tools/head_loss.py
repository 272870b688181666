"""The loss of a head node: every Ray process of it is ended by its pid, and the head started again.

    python -m tests.tools.head_loss           # `make trial-head-loss` prints its figures

A service in a cluster of `ray start`; one training reports over HTTP from outside of Ray, another
one runs on a worker node. Each writes down what was acknowledged: that is what the service must
have when it is back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import httpx
from tests.support.cluster import eventually, expect
from tests.support.ray_nodes import ROOT, RayNodes, Redis, free_port, short_directory
from tests.tools import journalled_training as training
from tests.tools.journalled_training import Line

import stagescope
from stagescope.session import Session

OUTSIDE: Final = "outside"
INSIDE: Final = "inside"
AFTERWARDS: Final = "afterwards"
WORKER: Final = "127.0.0.2"
STEPS: Final = 30
"""Acknowledged steps of each training before the loss, at least; and after it."""
WAIT_SECONDS: Final = 150.0
"""Deadline of every wait; only a failure takes so long."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured; seconds are from the loss."""

    title: str

    head_started: float
    """Until `ray start --head` had returned."""
    answered: float
    """Until the API answered with a step from before the loss, and was ready."""
    acknowledged: dict[str, int]
    """Run -> steps of which everything was acknowledged before the loss."""
    resumed: dict[str, float]
    """Run -> seconds until the next step was acknowledged."""
    afterwards: dict[str, int]
    """Run -> steps that the service has in the end."""
    slowest: dict[str, tuple[float, float]]
    """Run -> the longest step before the loss, and from it until everything was back, seconds."""
    wrong: list[str]
    """What the service had acknowledged and does not have, or lists as lost."""

    def __str__(self) -> str:
        """Return the figures as text."""
        lines = [
            f"{self.title}, seconds from the loss of the head:",
            f"  the head was started again         {self.head_started:6.1f}",
            f"  the service was ready and answered {self.answered:6.1f}",
        ]
        lines += [
            f"  {run}: a step was acknowledged{' ' * (12 - len(run))}{seconds:6.1f}"
            for run, seconds in self.resumed.items()
        ]
        lines += [
            f"{run}: {self.acknowledged.get(run, 0)} steps acknowledged before, {steps} in the end"
            for run, steps in self.afterwards.items()
        ]
        lines += [
            f"{run}: the slowest step took {calm:.2f} s before, {rough:.2f} s after"
            for run, (calm, rough) in self.slowest.items()
        ]
        return "\n".join([*lines, *(self.wrong or ["nothing acknowledged was lost"])])


class Cluster:
    """A cluster with a service and trainings, of which the head may be lost."""

    def __init__(self, directory: Path, redis: Redis | None) -> None:
        self._home = directory / "home"
        self._data = directory / "data"
        self.journal = directory / "journal"
        self.journal.mkdir()
        self._port = free_port()
        environment = {"STAGESCOPE_HOME": str(self._home)}
        self.nodes = RayNodes(directory / "ray", redis, environment)
        self._trainings: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def serve(self) -> None:
        """Start the service as a user does."""
        words = ["serve", "--address", self.nodes.address, "--port", str(self._port)]
        subprocess.run(
            [sys.executable, "-c", "from stagescope.cli import main; main()", *words,
             "--data-dir", str(self._data)],
            check=True, env=self.nodes.environment, cwd=ROOT, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def train(self, run: str, *ray: str) -> None:
        """Start a training; on a Ray node, where its address is given."""
        environment = self.nodes.environment
        if not ray:
            environment |= {
                "STAGESCOPE_URL": self.url,
                "STAGESCOPE_TOKEN_FILE": str(self._home / "operate.token"),
            }
        module = "tests.tools.journalled_training"
        self._trainings[run] = subprocess.Popen(
            [sys.executable, "-m", module, str(self.journal), run, *ray], env=environment, cwd=ROOT
        )

    def ranks(self, run: str) -> list[list[Line]]:
        """Return what each rank of a run has written."""
        numbers = [0] if run == OUTSIDE else [0, 1]
        return [training.read(self.journal, run, number) for number in numbers]

    def acknowledged(self, run: str) -> int:
        """Return the newest step of which everything was acknowledged of every rank."""
        return min(lines[-1].acknowledged if lines else 0 for lines in self.ranks(run))

    def await_steps(self, run: str, count: int) -> None:
        """Wait until a run has so many acknowledged steps."""

        def done() -> bool:
            if (code := self._trainings[run].poll()) is not None:
                raise RuntimeError(f"the training {run} ended with {code}")
            return self.acknowledged(run) >= count

        try:
            eventually(done, WAIT_SECONDS)
        except AssertionError as error:
            last = [lines[-1:] for lines in self.ranks(run)]
            raise AssertionError(f"{run} has not {count} steps acknowledged: {last}") from error

    def session(self) -> Session:
        token = (self._home / "operate.token").read_text().strip()
        return stagescope.attach(self.url, token=token, timeout=60.0)

    def is_back(self) -> bool:
        """Return whether the service is ready, and answers about a step from before."""
        try:
            if httpx.get(f"{self.url}/readyz", timeout=10.0).status_code != 200:
                return False
            with self.session() as session:
                return session.step(1, run=OUTSIDE).metrics()["counts/tokens"] > 0
        except httpx.TransportError:
            return False

    def end_trainings(self) -> list[str]:
        """Have the trainings end; return those that failed."""
        training.stop(self.journal)
        codes = {run: process.wait(120) for run, process in self._trainings.items()}
        return [f"the training {run} ended with {code}" for run, code in codes.items() if code]

    def close(self) -> None:
        """End all that is left."""
        for process in self._trainings.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        self.nodes.kill()


@contextlib.contextmanager
def cluster(*, with_redis: bool, with_worker: bool) -> Iterator[Cluster]:
    """A cluster of a head, perhaps a worker node, and a service."""
    with short_directory() as directory, contextlib.ExitStack() as stack:
        redis = None
        if with_redis:
            redis = Redis(directory / "redis")
            stack.callback(redis.stop)
        made = Cluster(directory, redis)
        stack.callback(made.close)
        made.nodes.start_head()
        if with_worker:
            made.nodes.start("worker", WORKER)
        made.serve()
        yield made


def lose_head(*, with_redis: bool, with_worker: bool) -> Figures:
    """Lose the head while trainings report, start it again, and compare what is there.

    Args:
        with_redis: behind the GCS. Without, the service is started again as well.
        with_worker: a training runs on a worker node, too, and another begins there afterwards.
    """
    with cluster(with_redis=with_redis, with_worker=with_worker) as made:
        inside = (made.nodes.address, WORKER)
        made.train(OUTSIDE)
        if with_worker:
            made.train(INSIDE, *inside)
        runs = (OUTSIDE, INSIDE) if with_worker else (OUTSIDE,)
        for run in runs:
            made.await_steps(run, STEPS)
        lost = made.nodes.kill("head")
        acknowledged = {run: made.acknowledged(run) for run in runs}
        made.nodes.start_head()
        started = time.time()
        if not with_redis:
            made.serve()
        eventually(made.is_back, WAIT_SECONDS)
        answered = time.time()
        for run, count in acknowledged.items():
            made.await_steps(run, count + STEPS)
        if with_worker:
            made.train(AFTERWARDS, *inside)
            made.await_steps(AFTERWARDS, STEPS)
            runs = (*runs, AFTERWARDS)
        wrong = made.end_trainings()
        ranks = {run: made.ranks(run) for run in runs}
        with made.session() as session:
            for run in runs:
                wrong += check(session, run, ranks[run], acknowledged.get(run, 0))
            wrong += _ring(session)
            keys = [row["attempt_key"] for run in runs for row in session.attempts(run)]
            wrong += [] if len({*keys}) == len(keys) else [f"jobs share attempt keys: {keys}"]
    return Figures(
        title="with Redis behind the GCS" if with_redis else "without Redis, with serve again",
        head_started=started - lost,
        answered=answered - lost,
        acknowledged=acknowledged,
        resumed={run: _resumed(ranks[run], count) - lost for run, count in acknowledged.items()},
        afterwards={run: min(lines[-1].step for lines in ranks[run]) for run in runs},
        slowest={run: _slowest(ranks[run], lost) for run in acknowledged},
        wrong=wrong,
    )


def _ring(session: Session) -> list[str]:
    """Return what is wrong with the tensors of the first step, which are in the old head's ring."""
    pinned = session.step(1, run=OUTSIDE).pin()
    return [] if pinned["payloads"] == 1 else [f"the ring of the old head: {dict(pinned)}"]


def check(session: Session, run: str, ranks: Sequence[Sequence[Line]], first: int) -> list[str]:
    """Return what a run lacks of what its ranks did.

    The numbers of the first steps are held to what was handed over, the others to be complete.
    """
    wrong: list[str] = []
    for step in range(1, first + 1):
        handed = [training.handed(rank, step) for rank in range(len(ranks))]
        try:
            expect(session.step(step, run=run), *handed)
        except AssertionError as error:
            wrong.append(f"{run}, step {step}: {error}")
    attempts = [row["attempt"] for row in session.attempts(run)]
    if attempts != [1]:
        wrong.append(f"{run} has the attempts {attempts}")
    last = min(lines[-1].step for lines in ranks)
    found = {row["step"]: row["complete"] for row in session.steps(run)}
    wrong += [
        f"{run}, step {step}: {found.get(step, 'unknown')}"
        for step in range(1, last + 1)
        if found.get(step) != "complete"
    ]
    wrong += [f"{run}: lost {row['kind']} of step {row['step']}: {row['reason']}"
              for row in session.lost(run)]  # fmt: skip
    dropped = sum(lines[-1].dropped for lines in ranks)
    return [*wrong, f"{run}: its probes dropped {dropped}"] if dropped else wrong


def _resumed(ranks: Sequence[Sequence[Line]], before: int) -> float:
    """Return when every rank of a run had a further step acknowledged."""
    return max(
        next(line.wall for line in lines if line.acknowledged > before + 1) for lines in ranks
    )


def _slowest(ranks: Sequence[Sequence[Line]], lost: float) -> tuple[float, float]:
    def slowest(*, after: bool) -> float:
        return max(
            line.seconds for lines in ranks for line in lines[1:] if (line.wall > lost) is after
        )

    return slowest(after=False), slowest(after=True)


def main() -> int:
    """Print the figures; return 1 where something acknowledged is lost, 2 without a Redis."""
    lost, has_redis = False, shutil.which("redis-server") is not None
    if not has_redis:
        sys.stderr.write(
            "redis-server is not installed: the trial with Redis behind the GCS is left out. "
            "`apt-get install redis-server` (or a package of your system) brings it.\n"
        )
    for with_redis in (True, False) if has_redis else (False,):
        figures = lose_head(with_redis=with_redis, with_worker=with_redis)
        sys.stdout.write(f"{figures}\n\n")
        lost = lost or bool(figures.wrong)
    return 1 if lost else 0 if has_redis else 2


if __name__ == "__main__":
    sys.exit(main())
