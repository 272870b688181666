"""What `GET /steps/N/rounds` takes for a step of many rounds, and whether that grows linearly.

Run: `python -m tests.benchmarks.bench_rounds`. A step is asked while it is open (its parts are
merged for the answer), once it is closed (its summary is read), and again. The reference of the
same run is one more read of all its stored parts, or of the stored summary: no answer needs less.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from tests.support.api import Rank, Service, service
from tests.support.measure import Handed, payload

from stagescope_service.statistics.codec import summary_from_bytes
from stagescope_service.statistics.step_summary import StepSummary

STAGE: Final = "actor_compute_log_prob"
SIZES: Final = (512, 1024, 2048, 4096)
WANTED: Final = 0.2
"""Seconds of a closed step of 4096 rounds."""
LINEAR: Final = 1.25
"""Most seconds a round of the largest step, over those of the step half its size."""
PATH: Final = "/steps/1/rounds"


def many_rounds(rounds: int, seed: int) -> Handed:
    """Two rows of `rounds` rounds of three tokens."""
    handed = payload(2, 4 * rounds, seed=seed, first_sample=2 * seed)
    mask = np.ones((2, 4 * rounds), np.int64)
    mask[:, 3::4] = 0
    handed["tensors"]["response_mask"] = ("int64", mask.shape, mask, None)
    return handed


def seconds(work: Callable[[], object]) -> float:
    """How long something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def asked(live: Service) -> None:
    """Ask for the first page of rounds."""
    answer = live.read.get(PATH)
    assert answer.status_code == 200, answer.text


def read_parts(live: Service) -> None:
    """Read what the answer about an open step is made of."""
    for row in live.catalogue.summaries(1, 1):
        assert row["summary"] is not None
        summary_from_bytes(row["summary"])


def read_summary(live: Service) -> None:
    """Read what the answer about a closed step is made of."""
    row = live.catalogue.step(1, 1)
    assert row is not None
    assert row["step_summary"] is not None
    StepSummary.from_bytes(row["step_summary"])


def measure(rounds: int, ranks: int) -> dict[str, tuple[float, float]]:
    """Return (seconds, ratio to its reference) of a step while open, once closed, and again."""
    with tempfile.TemporaryDirectory() as home, service(Path(home), recorded=False) as live:
        processes = [Rank(live, rank=rank, world_size=ranks) for rank in range(ranks)]
        for at, rank in enumerate(processes):
            rank.stage(STAGE, 1, many_rounds(rounds, at))
        asked(live)
        while_open = min(seconds(lambda: asked(live)) for _ in range(3))
        parts = min(seconds(lambda: read_parts(live)) for _ in range(3))
        for rank in processes:
            rank.begin(STAGE, 2)
        closed = seconds(lambda: asked(live))
        again = min(seconds(lambda: asked(live)) for _ in range(5))
        whole = min(seconds(lambda: read_summary(live)) for _ in range(3))
        return {
            "open": (while_open, while_open / parts),
            "closed": (closed, closed / whole),
            "again": (again, again / whole),
        }


def main() -> None:
    """Print seconds and ratios by size, and whether the bounds are met."""
    out = sys.stdout
    out.write(f"{'ranks':>6}{'rounds':>8}")
    out.write("".join(f"{name:>12} s{'ratio':>8}" for name in ("open", "closed", "again")) + "\n")
    for ranks in (1, 16):
        found = {rounds: measure(rounds, ranks) for rounds in SIZES}
        for rounds, times in found.items():
            out.write(f"{ranks:>6}{rounds:>8}")
            out.write("".join(f"{took:>14.3f}{ratio:>8.1f}" for took, ratio in times.values()))
            out.write("\n")
        half, full = SIZES[-2:]
        for name in ("open", "closed"):
            growth = found[full][name][0] / found[half][name][0] / (full / half)
            said = "met" if growth <= LINEAR else "MISSED"
            out.write(f"goal: {name}, {ranks} ranks, linear (x{growth:.2f} a round): {said}\n")
        slowest = max(found[full][name][0] for name in ("closed", "again"))
        said = "met" if slowest <= WANTED else "MISSED"
        out.write(f"goal: closed, {ranks} ranks, at most {WANTED} s ({slowest:.3f} s): {said}\n")


if __name__ == "__main__":
    main()
