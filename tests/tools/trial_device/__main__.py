"""Measure what stagescope does on a device: `make trial-device DEVICE=cuda`.

Exit status: 0; 1 if a check failed; 2 if the device is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.tools.trial_device import (
    captures,
    checksums,
    copies,
    load,
    ownership,
    pinned,
    report,
    steps,
    timing,
)
from tests.tools.trial_device.results import (
    FULL,
    QUICK,
    Effort,
    Failure,
    Outcome,
    Result,
    check,
    not_possible,
)
from tests.tools.trial_device.target import KINDS, Target

Measure = Callable[[Target, Effort], Result]
# The pool first: what torch's allocator holds is not yet of other copies.
MEASUREMENTS: Final[Mapping[str, Measure]] = {
    "pinned": pinned.measure,
    "copies": copies.measure,
    "ownership": ownership.measure,
    "timing": timing.measure,
    "checksums": checksums.measure,
    "steps": steps.measure,
    "captures": captures.measure,
    "load": load.measure,
}


def run(
    target: Target, effort: Effort, *, deadline: float, json: Path | None, is_quick: bool
) -> report.Trial:  # fmt: skip
    """Run each measurement, print it, and write all so far; one that raises hides no other.

    Args:
        target: the device.
        effort: how much to measure.
        deadline: when no further measurement begins, by `time.monotonic`.
        json: the file to write.
        is_quick: as the file says.
    """
    began = time.monotonic()
    device = target.description()
    sys.stdout.write(report.heading(device))
    results: dict[str, Result] = {}
    trial = report.Trial(device, is_quick, 0.0, results)
    for name, measure in MEASUREMENTS.items():
        results[name] = _measured(name, measure, target, effort, deadline)
        trial = report.Trial(device, is_quick, time.monotonic() - began, dict(results))
        sys.stdout.write(report.table(results[name]))
        sys.stdout.flush()
        if json is not None:
            report.write(json, trial)
    sys.stdout.write(report.verdict(trial))
    return trial


def _measured(
    name: str, measure: Measure, target: Target, effort: Effort, deadline: float
) -> Result:
    statement = f"{name} is measured"
    if time.monotonic() > deadline:
        return Failure(checks=(not_possible(statement, "the time of the trial was over"),))
    try:
        result = measure(target, effort)
        target.synchronize()
    except Exception as error:
        reason = f"{type(error).__name__}: {error!s:.300}"
        return Failure(checks=(check(statement, False, reason),))
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run a trial; return the exit status."""
    parser = argparse.ArgumentParser(prog="trial_device", description=__doc__)
    parser.add_argument("--device", default="auto", choices=("auto", *KINDS))
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of the whole trial")
    parser.add_argument("--quick", action="store_true", help="small sizes: 20 s, for tests")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(arguments)
    seconds = 60.0 * given.minutes
    try:
        target = Target.find(given.device)
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    effort = QUICK if given.quick else FULL
    # The longest measurement is the last.
    deadline = time.monotonic() + seconds - effort.load_seconds
    with _ended_after(seconds), _warnings_alone():
        trial = run(target, effort, deadline=deadline, json=given.json, is_quick=given.quick)
    return int(trial.outcome is Outcome.FAILED)


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End this process where a device hangs, with its stacks; what was measured is in the file."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or 2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _warnings_alone() -> Iterator[None]:
    """Leave out the line of each probe that says where it sends to."""
    logger = logging.getLogger("stagescope")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
