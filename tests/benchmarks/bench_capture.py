"""What a capture costs: the step that is dumped, and every step after it (target: within 2 %).

    python -m tests.benchmarks.bench_capture

The step is forward and backward of a small decoder: a capture's residue is pure Python per module
and call, so a small model shows it best. Two processes run blocks of steps in turn; one of them
captures in between. The ratio of their blocks afterwards, over the same ratio before, is the cost
that stays: what else the machine does, and how the two processes differ, falls out. Both have
imported msprobe (and with it torch._dynamo); what that import alone costs is measured the same way.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from tests.support.dumps import capture_request
from tests.support.small_decoder import SmallDecoder, forward_backward, small_decoder, token_ids

from stagescope_wire.schema import Part
from stagescope_workers.capture.msprobe_capture import begin_capture
from stagescope_workers.capture.msprobe_patches import load_debugger_class

BLOCKS, STEPS = 40, 25
LEVELS = ("L0", "L1", "mix")


def capture(
    model: SmallDecoder, step: Callable[[], object], level: str, task: str, root: str
) -> dict[str, Any]:
    armed = begin_capture(
        capture_request(capture_id="bench", config={"task": task, "level": level}), run="bench",
        attempt_key="1", stage="actor_update", step=0, part=Part(), role="actor", rank=0,
        model=model, data_root=root,
    )  # fmt: skip
    assert armed is not None
    step()
    result = armed.finish(None)
    assert result["state"] == "complete", result
    return result


def serve_blocks(root: str) -> None:
    """Run what stdin names: `block`, or a level to capture at; answer with CPU seconds a step."""
    torch.set_num_threads(1)
    model, tokens = small_decoder(), token_ids(2, 16)

    def step() -> float:
        return forward_backward(model, tokens)

    for line in sys.stdin:
        if line.strip() == "import":
            load_debugger_class()
        elif line.strip() != "block":
            for _ in range(2):
                capture(model, step, line.strip(), "statistics", root)
        # CPU time: what others do on the machine counts less than in wall time.
        began = time.process_time()
        for _ in range(STEPS):
            step()
        sys.stdout.write(f"{(time.process_time() - began) / STEPS}\n")
        sys.stdout.flush()


def ask(process: subprocess.Popen[str], what: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(what + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def ratio(first: subprocess.Popen[str], second: subprocess.Popen[str]) -> float:
    """Median over blocks of second / first, in changing order."""
    ratios = []
    for block in range(BLOCKS):
        if block % 2:
            one, other = ask(first, "block"), ask(second, "block")
        else:
            other, one = ask(second, "block"), ask(first, "block")
        ratios.append(other / one)
    return statistics.median(ratios)


def residue(what: str, root: str) -> float:
    """The step after a capture (or after the import alone) over the step before it."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_capture", "serve", root]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    pristine, used = processes
    try:
        for process in processes * 3:
            ask(process, "block" if what == "import" else "import")
        before = ratio(pristine, used)
        ask(used, what)
        return ratio(pristine, used) / before
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=30)
            assert process.stdout is not None
            process.stdout.close()


def dump_step(level: str, task: str, width: int, length: int, root: str) -> dict[str, float]:
    """The step that is dumped over a plain one, in wall time, and the dump's size."""
    model, tokens = small_decoder(width=width, vocabulary=1000), token_ids(2, length, 1000)

    def step() -> float:
        return forward_backward(model, tokens)

    result = capture(model, step, level, task, root)
    plain, dumped = [], []
    for _ in range(7):
        began = time.perf_counter()
        step()
        middle = time.perf_counter()
        capture(model, step, level, task, root)
        plain.append(middle - began)
        dumped.append(time.perf_counter() - middle)
    return {
        "dump step / step": statistics.median(dumped) / statistics.median(plain),
        "step seconds": statistics.median(plain),
        "bytes": float(result["bytes"]),
    }


def main() -> None:
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as root:
        for level in ("import", *LEVELS):
            results[f"{level} afterwards"] = {"step after / before": residue(level, root)}
        for task, level in (*(("statistics", level) for level in LEVELS), ("tensor", "L1")):
            for width, length in ((64, 64), (512, 256)):
                name = f"{task} {level}, width {width}, {2 * length} tokens"
                results[name] = dump_step(level, task, width, length, root)
    for name, values in results.items():
        text = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        sys.stdout.write(f"{name:42} {text}\n")
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve_blocks(sys.argv[2])
    else:
        main()
