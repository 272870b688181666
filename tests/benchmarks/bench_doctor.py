"""What a diagnosis costs: the first one of a run, and the next after each step that closes.

If the tensors of the newest step are kept and say what the loss did, the doctor reads them. This
costs more with each rank, and has no bound.

    python -m tests.benchmarks.bench_doctor [STEPS [RANKS]]

The reference is to read the numbers of as many steps from the catalogue, as the doctor stores them:
JSON, once. Every figure is CPU time of one thread; the best and the median of several runs count,
because the machine may be busy.
"""

from __future__ import annotations

import gc
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.support.api import Service, service
from tests.support.runs.long import RUN, LongRun, train_long
from tests.support.runs.shown import keep_tensors

from stagescope_service.statistics.summarise import warm
from stagescope_service.views.diagnosis import diagnosis_of
from stagescope_service.views.reading.dependencies import Dependencies

TIMES: Final = 7
FIRST: Final = 1.0
"""Seconds that the first diagnosis may take."""
NEXT: Final = 0.1
"""Seconds that one may take after a step closed."""


def cost(function: Callable[[], object]) -> float:
    """Return the seconds of CPU that a call takes in this thread."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def read_numbers(path: Path) -> None:
    """Read the numbers of every step once."""
    connection = sqlite3.connect(path)
    for (text,) in connection.execute("SELECT metrics FROM step_metrics WHERE attempt_id = 1"):
        json.loads(text)
    connection.close()


def measure(live: Service, run: LongRun, steps: int) -> None:
    """Print the costs."""
    deps: Dependencies = live.app.state.deps
    path = live.settings.data_path / "catalogue.db"
    reference = [cost(lambda: read_numbers(path)) for _ in range(TIMES)]
    diagnosis_of(deps, RUN, None, None)  # loads what the first one of a process loads
    gc.collect()
    gc.freeze()  # as the process of the API does
    first = []
    for _ in range(TIMES):
        deps.memories.__init__()  # type: ignore[misc]  # what was read is forgotten
        first.append(cost(lambda: diagnosis_of(deps, RUN, None, None)))
    after = []
    for step in range(steps + 1, steps + 1 + TIMES):
        run.extend(live.store, [step], keep=2000)
        after.append(cost(lambda: diagnosis_of(deps, RUN, None, None)))
    keep_tensors(live)
    kept: list[float] = []
    with_loss: list[float] = []
    for step in range(steps + TIMES + 1, steps + 3 * TIMES + 1):
        times = kept if len(kept) < TIMES else with_loss
        run.train(live, step, with_loss=times is with_loss)
        times.append(cost(lambda: diagnosis_of(deps, RUN, None, None)))
    say(f"{'':34}{'best':>9}{'median':>9}{'ratio':>8}   wanted")
    rows = [
        (f"reading the numbers of {steps} steps", reference, None),
        ("the first diagnosis", first, FIRST),
        ("the next, after a step closed", after, NEXT),
        ("the same, with its tensors kept", kept, NEXT),
        ("the same, with what the loss did", with_loss, None),
    ]
    for name, times, wanted in rows:
        best, median = min(times), statistics.median(times)
        bound = "" if wanted is None else f"<= {wanted:g} s"
        say(f"{name:34}{best:8.3f}s{median:8.3f}s{best / min(reference):8.2f}   {bound}")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(steps: int, ranks: int) -> None:
    """Make a run, and measure its diagnoses."""
    warm()
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        run = train_long(home, steps, ranks=ranks)
        with service(home, recorded=False, resumes=True) as live:
            say(f"{steps} steps x {ranks} ranks")
            measure(live, run, steps)


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main(*(given + [2000, 64][len(given) :]))
