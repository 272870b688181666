"""What the plugin costs a verl step: watched and nothing armed, over verl without it.

    .venv-verl/bin/python -m tests.benchmarks.bench_verl [--trainer v0] [--steps 16] [--repeat 2]

Real trainings of the CPU example take turns on one cluster: without the plugin
(STAGESCOPE_VERL=off), with it and a service, with it and no service. The figures are medians of
verl's own `timing_s/step` after the first steps, as ratios to the trainings without the plugin;
`noise` is the same ratio between those themselves. The example's steps take about a second, most
of it Python: a step of a real model hides what stands here.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

from tests.support.cluster import Service, ray_cluster
from tests.support.verl_runs import VerlRun

_WARM_STEPS = 3
_OFF = {"STAGESCOPE_VERL": "off"}


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def step_seconds(run: VerlRun) -> float:
    """Train, and return the median seconds of a step."""
    run.train()
    logged = run.logged()
    seconds: list[float] = [
        metrics["timing_s/step"] for step, metrics in logged.items() if step > _WARM_STEPS
    ]
    return statistics.median(seconds)


def measure(trainer: str, steps: int, repeat: int, address: str, folder: Path) -> None:
    """Run the trainings in turn and print their ratios."""
    taken: dict[str, list[float]] = {"without": [], "no service": [], "watched": []}

    def train(name: str, turn: int, variables: dict[str, str]) -> None:
        directory = folder / f"{name.replace(' ', '_')}_{turn}"
        run = VerlRun(directory, address, trainer, steps, ("trainer.save_freq=-1",), variables)
        taken[name].append(step_seconds(run))

    for turn in range(repeat):
        train("without", turn, _OFF)
        train("no service", turn, {})
    service = Service.start(folder / "home", address)
    try:
        for turn in range(repeat):
            train("watched", turn, {})
            train("without", repeat + turn, _OFF)
    finally:
        service.stop()
    reference = statistics.median(taken["without"])
    say(f"{trainer}, {steps} steps, a step without the plugin {reference:.3f} s (median)")
    noise = [a / b for a, b in itertools.permutations(taken["without"], 2)]
    say(f"noise       {min(noise):.3f} .. {max(noise):.3f}")
    for name in ("no service", "watched"):
        ratios = " ".join(f"{seconds / reference:.3f}" for seconds in taken[name])
        say(f"{name:11} {statistics.median(taken[name]) / reference:.3f}  ({ratios})")


def main() -> None:
    """Measure one trainer of verl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainer", choices=("v0", "v1"), default="v0")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=2)
    given = parser.parse_args()
    if importlib.util.find_spec("verl") is None:
        say("verl is not installed here: make bench-verl runs this where it is")
        sys.exit(0)
    options = {"num_cpus": 16, "object_store_memory": 400_000_000}
    with tempfile.TemporaryDirectory() as folder, ray_cluster(**options) as address:
        measure(given.trainer, given.steps, given.repeat, address, Path(folder))


if __name__ == "__main__":
    main()
