"""What keeping a step costs the training thread, over `torch.save` of the same tensors there.

    python -m tests.benchmarks.bench_keep [--rows 64] [--tokens 4096] [--steps 60]

Every second step is kept: it hands over the intermediates of an importance-sampling loss for two
microbatches. Then the same tensors are saved as other trainers dump them, one file a microbatch,
from the training thread. What a kept step takes beyond one that is not kept is what keeping costs;
"whole" has the reporting of both stages in it, which is there in any case. Medians as ratios: times
themselves mean nothing on a shared machine. A service takes what comes, over Ray.

* hand over: `stage.hand_over`, for tensors that nobody writes any more
* record anyway: `stage.record` of tensors that are reported, kept or not, as the streams are
* record: `stage.record` of what is only reported where it is kept; it owns a copy before it returns
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from tests.benchmarks.bench_probe import start_service, timed
from tests.support.coordinators import wait_for

from stagescope_workers.probe import lifecycle
from stagescope_workers.probe.probe import Probe

MICROBATCHES = 2
MOST = 0.1
"""What keeping may cost of `torch.save`."""


def intermediates(rows: int, tokens: int, device: str) -> dict[str, torch.Tensor]:
    """Return what is kept of one microbatch."""
    names = ("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss")
    made = {name: -torch.rand(rows, tokens, device=device) for name in names}
    mask = torch.ones(rows, tokens, device=device)
    return {**made, "effective_valid": mask, "response_mask": mask.clone()}


def report(probe: Probe, step: int, tensors: Mapping[str, torch.Tensor], how: str) -> float:
    """Do the stages of a step, kept at every second one; return the seconds that they took.

    What was handed over has left before the next microbatch: its computing takes longer than that.
    """
    took = 0.0
    for microbatch in range(MICROBATCHES):
        begin = time.perf_counter()
        with probe.stage("actor_update", step=step, microbatch=microbatch) as stage:
            if how == "record anyway" or stage.wants("prob_ratio"):
                (stage.hand_over if how == "hand over" else stage.record)(**tensors)
            stage.log(loss=0.5)
        took += time.perf_counter() - begin
        settle(probe)
    return took


def save(folder: Path, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Save the same, as a dump in the training thread does."""
    for microbatch in range(MICROBATCHES):
        path = folder / f"step_{step:06d}_rank0_micro{microbatch}.pt"
        torch.save({**tensors, "loss": 0.5}, path)


def settle(probe: Probe) -> None:
    """Wait until what was handed over has left."""
    wait_for(lambda: not probe.status()["waiting_events"])


def measure(
    probe: Probe, folder: Path, steps: int, tensors: Mapping[str, torch.Tensor], how: str
) -> tuple[float, float, float]:
    """Return the median seconds of a kept step, of one that is not, and of saving."""
    times: tuple[list[float], ...] = ([], [], [])
    for step in range(steps):
        times[step % 2].append(report(probe, step, tensors, how))
        times[2].append(timed(lambda step=step: save(folder, step, tensors)))  # type: ignore[misc]
        for path in folder.iterdir():
            path.unlink()
    kept, plain, saved = map(statistics.median, times)
    return kept, plain, saved


def main() -> None:
    """Print a line for each way and device; exit with 1 where handing over costs too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    handle, _ = start_service()
    highest = 0.0
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        tensors = intermediates(given.rows, given.tokens, device)
        nbytes = MICROBATCHES * sum(tensor.nbytes for tensor in tensors.values())
        for how in ("hand over", "record anyway", "record"):
            probe = lifecycle.init(
                "bench",
                attempt_key=device + how,
                max_pending_bytes=8 * nbytes,
                keep={"every_n_steps": 2, "what": ["is_loss"]},
            )
            wait_for(lambda probe=probe: probe.status()["connected"])  # type: ignore[misc]
            with tempfile.TemporaryDirectory() as folder:
                kept, plain, saved = measure(probe, Path(folder), given.steps, tensors, how)
            cost = (kept - plain) / saved
            highest = max(highest, cost if how != "record" else 0.0)
            sys.stdout.write(
                f"{device} {how:13}: {nbytes / 1e6:.1f} MB a step, keeping costs "
                f"x{cost:.3f} of torch.save, whole x{kept / saved:.3f}; dropped "
                f"{probe.status()['dropped']}\n"
            )
            probe.close(5.0)
    del handle
    sys.stdout.write(f"at most x{MOST:g} by hand over, and of what is recorded: x{highest:.3f}\n")
    sys.exit(highest > MOST)


if __name__ == "__main__":
    main()
