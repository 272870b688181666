"""What a stage costs the training thread: with the service absent, serving, hung and killed.

    python tests/benchmarks/bench_probe.py [--rows 256] [--tokens 2048] [--steps 60]

Each mode runs the same step of numpy work, with and without the probe in turn, and prints
medians as ratios: times themselves mean nothing on a shared machine.

* step: time of the step with the probe, over the same step without it
* record: time in begin + record + log + end, over one copy of the payload's bytes to fresh memory,
  which is what a copy costs that is kept until it was sent
* hand_over: the same with hand_over and torch tensors
* in place: the times with both, over one copy into memory that is in use. `record` owns a copy
  before it returns, so its ratio cannot be less than 1
* bare: the same stage without a payload, in microseconds
"""

from __future__ import annotations

import argparse
import functools
import mmap
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tests.support.coordinators import wait_for

from stagescope_workers.probe import lifecycle
from stagescope_workers.probe.probe import Probe

WANTED = {"record": 0.7, "hand_over": 0.3}
"""The most that each call may cost, in copies to fresh memory."""
MODES = ("absent", "serving", "hung", "killed")
Tensors = dict[str, "np.ndarray[Any, Any]"]


def make_payload(rows: int, tokens: int) -> Tensors:
    """Return what a rank hands over with its log-probs."""
    generator = np.random.default_rng(0)
    old = -generator.random((rows, tokens), dtype=np.float32)
    return {
        "rollout_log_probs": old + np.float32(1e-3),
        "old_log_probs": old,
        "response_mask": generator.random((rows, tokens)) < 0.7,
        "responses": generator.integers(0, 150_000, (rows, tokens)),
    }


def work(matrix: npt.NDArray[np.float32], seconds: float) -> None:
    """Compute for about `seconds`."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        np.matmul(matrix, matrix)


def copy_to_fresh_memory(arrays: Iterable[np.ndarray[Any, Any]]) -> None:
    """Copy arrays to memory that the process never had: malloc would give back what it knows."""
    for array in arrays:
        with mmap.mmap(-1, array.nbytes) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)  # as numpy does
            copy = np.frombuffer(memory, array.dtype).reshape(array.shape)
            np.copyto(copy, array)
            del copy


def copy_in_place(arrays: Tensors, into: Tensors) -> None:
    """Copy arrays into memory that the process uses."""
    for name, array in arrays.items():
        np.copyto(into[name], array)


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that `call` takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(probe: Probe, payload: Tensors, steps: int) -> dict[str, float]:
    """Return the medians of one mode."""
    matrix = np.ones((128, 128), np.float32)
    ids = [str(row) for row in range(len(payload["responses"]))]
    mine = {name: array.copy() for name, array in payload.items()}
    bare, plain, probed, copies, in_place = [], [], [], [], []
    costs: dict[str, list[float]] = {"record": [], "hand_over": []}

    def record(step: int) -> None:
        with probe.stage("actor_compute_log_prob", step=step) as stage:
            stage.record(**payload, sample_ids=ids)
            stage.log(loss=0.5)

    def hand_over(step: int, results: dict[str, torch.Tensor]) -> None:
        with probe.stage("actor_update", step=step) as stage:
            stage.hand_over(**results, sample_ids=ids)
            stage.log(loss=0.5)

    def empty(step: int) -> None:
        with probe.stage("critic_update", step=step):
            pass

    def work_and_report(step: int) -> None:
        work(matrix, 0.2)
        costs["record"].append(timed(lambda: record(step)))

    for step in range(steps):
        copies.append(timed(lambda: copy_to_fresh_memory(payload.values())))
        in_place.append(timed(lambda: copy_in_place(payload, mine)))
        plain.append(timed(lambda: work(matrix, 0.2)))
        probed.append(timed(lambda step=step: work_and_report(step)))  # type: ignore[misc]
        bare.append(timed(lambda step=step: empty(step)))  # type: ignore[misc]
        results = {name: torch.from_numpy(array.copy()) for name, array in payload.items()}
        work(matrix, 0.1)
        costs["hand_over"].append(timed(functools.partial(hand_over, step, results)))
    copy = statistics.median(copies)
    return {
        "step": statistics.median(probed) / statistics.median(plain),
        **{call: statistics.median(took) / copy for call, took in costs.items()},
        "worst": max(costs["record"]) / copy,
        **{
            f"{call} in place": statistics.median(took) / statistics.median(in_place)
            for call, took in costs.items()
        },
        "bare_us": statistics.median(bare) * 1e6,
    }


def start_service() -> tuple[object, int]:
    """Start a Ray cluster with a coordinator that takes everything; return it and its pid."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=500_000_000,
        include_dashboard=False,
        log_to_driver=False,
    )

    class DebugCoordinator:
        async def record_events(
            self, *, sender: object, events: object, payloads: Any = None
        ) -> object:
            receipts = dict.fromkeys(payloads or {}, "ingested")
            return {"coordinator": "one", "wall": time.time(), "receipts": receipts}

        async def poll(
            self, *, sender: object, revision: int, unreceipted: Any, wait: float
        ) -> object:
            import asyncio

            await asyncio.sleep(wait)
            receipts = dict.fromkeys(unreceipted, "ingested")
            return {"coordinator": "one", "wall": time.time(), "receipts": receipts}

        async def pid(self) -> int:
            return os.getpid()

    actor: Any = ray.remote(DebugCoordinator).options(
        name="DebugCoordinator", namespace="stagescope", num_cpus=0
    )
    handle = actor.remote()
    pid: Any = ray.get(handle.pid.remote())
    return handle, int(pid)


def main() -> None:
    """Measure each mode and print one line for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    payload = make_payload(given.rows, given.tokens)
    nbytes = sum(array.nbytes for array in payload.values())
    sys.stdout.write(f"payload {nbytes / 1e6:.1f} MB, {given.steps} steps a mode\n")
    handle, pid = None, 0
    for mode in MODES:
        if mode == "serving":
            handle, pid = start_service()
        probe = lifecycle.init("bench", attempt_key=mode, max_pending_bytes=8 * nbytes)
        if mode != "absent":
            wait_for(lambda probe=probe: probe.status()["connected"])  # type: ignore[misc]
        if mode == "hung":
            os.kill(pid, signal.SIGSTOP)
        elif mode == "killed":
            os.kill(pid, signal.SIGKILL)
        found = measure(probe, payload, given.steps)
        sys.stdout.write(
            f"{mode:8} step x{found['step']:.3f}"
            + "".join(f"  {call} x{found[call]:.2f} (<= {most})" for call, most in WANTED.items())
            + f"  worst x{found['worst']:.1f}"
            f"  in place x{found['record in place']:.2f}, x{found['hand_over in place']:.2f}"
            f"  bare {found['bare_us']:.0f} us"
            f"  dropped {probe.status()['dropped']}\n"
        )
        if mode == "hung":
            os.kill(pid, signal.SIGCONT)
        probe.close(1.0)
    del handle


if __name__ == "__main__":
    main()
