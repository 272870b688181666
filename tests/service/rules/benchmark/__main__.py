"""Print how good the doctor is: each fault with its first cause, and the figures."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time

from tests.service.rules.benchmark.faults import FAULTS, HELD_OUT
from tests.service.rules.benchmark.healthy import HEALTHY
from tests.service.rules.benchmark.measure import Result, measure, table


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.service.rules.benchmark")
    parser.add_argument("--only", default="*", help="names of faults, with *")
    parser.add_argument("--tuned", action="store_true", help="without the faults held out")
    parser.add_argument("--faults", action="store_true", help="without the healthy runs")
    parser.add_argument("--healthy", action="store_true", help="only the healthy runs")
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    begun = time.monotonic()
    faults = [each for each in FAULTS if fnmatch.fnmatch(each.name, asked.only)]
    faults = [] if asked.healthy else faults
    if asked.tuned:
        faults = [each for each in faults if each.name not in HELD_OUT]
    healthy = [each for each in HEALTHY if fnmatch.fnmatch(each.name, asked.only)]
    results, alarms = measure(faults, () if asked.faults else healthy, asked.processes)
    lines = [_line(each) for each in results]
    lines += [
        f"false alarm in {each.run}, step {each.step}: {each.rule}: {each.text}" for each in alarms
    ]
    if results:
        lines.append(table(results, HELD_OUT, alarms))
    lines.append(f"{time.monotonic() - begun:.0f} s")
    sys.stdout.write("\n".join(lines) + "\n")


def _line(result: Result) -> str:
    fault = result.fault
    mark = "1st" if result.is_first else "3  " if result.is_among_three else "-  "
    place = f" at {fault.where!r}" if fault.where else ""
    expected = f"{', '.join(sorted(fault.causes))}{place}"
    if fault.second:
        expected += f" and {', '.join(sorted(fault.second))}"
    named = "; ".join(result.named[:5]) or "nothing"
    return f"{mark} {result.position or '-'}  {fault.name}: expected {expected}; named {named}"


if __name__ == "__main__":
    main()
