"""What it takes to compare two dumps of very many small files, and whether that grows linearly.

Run: `python -m tests.benchmarks.bench_compare_files [most files]`, by default 8000 a side. The
reference of the same run is to list and read both sides once, on one thread.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.benchmarks.bench_compare import read_once, shard

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report import as_json
from stagescope_service.compare.results import Verdict
from stagescope_service.dumps.discover import open_dump
from stagescope_service.store.kept import Kept, write_kept

RANKS: Final = 8
LINEAR: Final = 1.25
"""Most CPU of a file at the most files, over that at half as many."""
GOAL: Final = 4.0
"""Most CPU over that of reading both sides once."""


def write(path: Path, files: int) -> None:
    """Kept files of two rows of 16 tokens, one a rank and microbatch."""
    values = shard(2, 16, 0)
    sections = {
        "forward_data": ["log_probs", "entropy", "response_mask"],
        "is_loss": ["old_log_probs", "advantages", "prob_ratio", "response_mask"],
        "loss": ["loss"],
    }
    for at in range(files):
        rank, micro = at % RANKS, at // RANKS
        job = {"run": "bench", "attempt_key": "1", "role": "actor", "rank": rank, "step": 0,
               "stage": "actor_update", "microbatch": micro}  # fmt: skip
        write_kept(
            path / f"step_0/actor_update/0.0.0.{micro}"
            / f"actor_rank{rank}_{'0' * 12}_{micro}.safetensors",
            Kept(tensors={n: (str(v.dtype), v.shape, v, None) for n, v in values.items()},
                 sections=sections, scalars={"loss": 0.5},
                 strings={"sample_ids": [f"{at}_0", f"{at}_1"]}, meta={}, job=job),
        )  # fmt: skip


def linked(source: Path, target: Path) -> None:
    """The same files in another directory."""
    for path in source.rglob("*.safetensors"):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, copy)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of something, of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def compared(a: Path, b: Path) -> None:
    """The whole comparison, from listing the directories to the report."""
    result = compare([open_dump(a), open_dump(b)])
    assert result.verdict is Verdict.SAME, result.reason
    as_json(result)


def main() -> None:
    """Print CPU, ratios and whether the bounds are met."""
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    out, per_file = sys.stdout, []
    out.write(f"{'files a side':>14}{'CPU s':>9}{'ms a file':>11}{'ratio to reading':>18}\n")
    with tempfile.TemporaryDirectory() as home:
        write(Path(home, "warm", "a"), RANKS)
        compared(Path(home, "warm", "a"), Path(home, "warm", "a"))  # compiles
        ratio = 0.0
        for files in (most // 4, most // 2, most):
            a, b = (Path(home, str(files), side) for side in "ab")
            write(a, files)
            linked(a, b)
            reading = cpu_seconds(lambda a=a, b=b: read_once(a, b))  # type: ignore[misc]
            took = cpu_seconds(lambda a=a, b=b: compared(a, b))  # type: ignore[misc]
            per_file.append(took / files)
            ratio = took / reading
            out.write(f"{files:>14}{took:>9.2f}{1e3 * took / files:>11.2f}{ratio:>18.1f}\n")
    growth = per_file[-1] / per_file[-2]
    said = "met" if growth <= LINEAR else "MISSED"
    out.write(f"goal: linear, x{growth:.2f} a file at twice the files: {said}\n")
    said = "met" if ratio <= GOAL else "MISSED"
    out.write(f"goal: at most {GOAL} x reading both sides once: {said}\n")


if __name__ == "__main__":
    main()
