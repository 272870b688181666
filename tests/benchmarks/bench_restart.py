"""How soon a killed coordinator, ingestor or API answers again.

    python -m tests.benchmarks.bench_restart [--times 10] [--busy 2] [--pause 5]

Each is killed with SIGKILL in turn, in a cluster of its own. Seconds are from the kill until

* the coordinator: Ray made it anew and /readyz says ready,
* the ingestor: a payload that a rank handed over after the kill has its receipt,
* the API: Ray made it anew and /readyz says ready.

With `--busy`, so many processes compute all the time beside it. The load average stands beside the
figures: they hold for a machine that is as busy.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.cluster import Service, eventually, ray_cluster
from tests.support.measure import payload
from tests.support.ranks import Rank


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Have processes compute beside what is measured."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def receipt_of(rank: Rank, step: int) -> Callable[[], object]:
    """Have a rank hand over a payload; return whether it has its receipt."""
    rank.ask("report", step, payload(seed=step))
    return rank.settled


def measure(times: int, pause: float) -> dict[str, list[float]]:
    """Return the seconds from each kill until an answer, by what was killed."""
    seconds: dict[str, list[float]] = {"coordinator": [], "ingestor": [], "api": []}
    with ray_cluster() as address, tempfile.TemporaryDirectory() as name:
        service = Service.start(Path(name) / "home", address)
        rank = Rank("restart", world_size=1)
        try:
            eventually(receipt_of(rank, 1))
            for step in range(2, times + 2):
                for which, taken in seconds.items():
                    time.sleep(pause)  # Ray keeps idle worker processes for the next actor
                    pid = service.pid(which)
                    killed = time.monotonic()
                    service.kill(which, pid)
                    if which == "ingestor":
                        eventually(receipt_of(rank, step))
                    else:
                        service.reborn(which, pid)
                        eventually(lambda: service.ready()[0] == 200)
                    taken.append(time.monotonic() - killed)
        finally:
            rank.kill()
            service.stop()
    return seconds


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--pause", type=float, default=5.0)
    options = parser.parse_args()
    before = os.getloadavg()[0]
    with busy(options.busy):
        seconds = measure(options.times, options.pause)
    after = os.getloadavg()[0]
    sys.stdout.write(
        f"{os.cpu_count()} CPUs, {options.busy} busy loops beside, load average {before:.1f} before"
        f" and {after:.1f} after\n"
    )
    for which, taken in seconds.items():
        low, middle, high = min(taken), statistics.median(taken), max(taken)
        sys.stdout.write(
            f"{which:<12} {low:5.1f} {middle:5.1f} {high:5.1f} s (least, median, most of "
            f"{len(taken)} kills)\n"
        )


if __name__ == "__main__":
    main()
