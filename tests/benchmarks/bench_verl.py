"""What the plugin costs a verl step: watched and nothing armed, over verl without it.

    .venv-verl/bin/python -m tests.benchmarks.bench_verl [--trainer v0] [--steps 16] [--repeat 2]

Real trainings of the CPU example take turns on one cluster: without the plugin
(STAGESCOPE_VERL=off), with it and a service, with it and no service. The figures are medians of
verl's own `timing_s/step` after the first steps, as ratios to the trainings without the plugin;
`noise` is the same ratio between those themselves. The example's steps take about a second, most
of it Python: a step of a real model hides what stands here.

On a machine of few cores the service's own work stands in the way of the ranks, too. So CPU
seconds a step are printed beside, by whose they are: the training's processes (driver and ranks,
as a ratio to those without the plugin), the service's by actor, and Ray's own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from tests.support.cluster import Service, ray_cluster
from tests.support.trainers.verl_runs import VerlRun

_WARM_STEPS = 3
_OFF = {"STAGESCOPE_VERL": "off"}
_SERVICE = ("DebugCoordinator", "Ingestor", "ApiServer")


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class CpuSeconds:
    """CPU seconds of this process's descendants by whose they are, taken twice a second.

    They are the cluster that it started, the service in that and the training: other clusters of
    this machine do not count.

    Of a process that ended the last sample counts; those that ran before are counted from here.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, float], float] = {}
        self._last: dict[tuple[int, float], tuple[str, float]] = {}
        self._stopping = threading.Event()
        self._sample()
        self._first = {key: seconds for key, (_, seconds) in self._last.items()}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Return the seconds of each owner since this was made."""
        self._stopping.set()
        self._thread.join()
        found: dict[str, float] = {}
        for key, (owner, seconds) in self._last.items():
            found[owner] = found.get(owner, 0.0) + seconds - self._first.get(key, 0.0)
        return found

    def _run(self) -> None:
        while not self._stopping.wait(0.5):
            self._sample()

    def _sample(self) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                owner = _owner(" ".join(process.cmdline()))
                if owner is not None:
                    times = process.cpu_times()
                    key = (process.pid, process.create_time())
                    self._last[key] = (owner, times.user + times.system)


def _owner(command: str) -> str | None:
    actor = command.partition("ray::")[2].partition(".")[0].strip() if "ray::" in command else ""
    if actor in _SERVICE:
        return actor
    if actor or "examples.verl_cpu.train" in command:
        return "training"
    return "Ray" if "/ray/" in command else None


def step_seconds(run: VerlRun) -> tuple[float, dict[str, float]]:
    """Train; return the median seconds of a step, and CPU seconds a step by whose they are."""
    with run.started() as process:
        run.await_step(_WARM_STEPS)
        done = max(run.logged())
        cpu = CpuSeconds()
        run.finish(process)
        taken = cpu.stop()
    steps = max(run.logged()) - done
    return _median_seconds(run), {owner: seconds / steps for owner, seconds in taken.items()}


def _median_seconds(run: VerlRun) -> float:
    logged = run.logged()
    seconds: list[float] = [
        metrics["timing_s/step"] for step, metrics in logged.items() if step > _WARM_STEPS
    ]
    return statistics.median(seconds)


def measure(trainer: str, steps: int, repeat: int, address: str, folder: Path) -> None:
    """Run the trainings in turn and print their ratios."""
    taken: dict[str, list[float]] = {"without": [], "no service": [], "watched": []}
    cpu: dict[str, list[dict[str, float]]] = {name: [] for name in taken}

    def train(name: str, turn: int, variables: dict[str, str]) -> None:
        directory = folder / f"{name.replace(' ', '_')}_{turn}"
        run = VerlRun(directory, address, trainer, steps, ("trainer.save_freq=-1",), variables)
        seconds, used = step_seconds(run)
        taken[name].append(seconds)
        cpu[name].append(used)

    for turn in range(repeat):
        train("without", turn, _OFF)
        train("no service", turn, {})
    # As often as a service of users is polled; that of the tests is asked every second.
    service = Service.start(folder / "home", address, lease_seconds=45.0, poll_seconds=20.0)
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
    say_cpu(cpu)


def say_cpu(cpu: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Print whose CPU seconds a step takes, the training's also as a ratio."""
    reference = statistics.median(used["training"] for used in cpu["without"])
    say(f"CPU seconds a step: the training's own without the plugin {reference:.3f}")
    for name, turns in cpu.items():
        owners = sorted({owner for used in turns for owner in used})
        mean = {o: statistics.median(used.get(o, 0.0) for used in turns) for o in owners}
        rest = ", ".join(f"{o} {mean[o]:.3f}" for o in owners if o != "training")
        ratio = mean["training"] / reference
        say(f"{name:11} training {mean['training']:.3f} ({ratio:.3f} of it), {rest}")


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
