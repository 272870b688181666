"""What it takes to compare two dumps of 8 ranks x 2 microbatches, everything checked.

    python -m tests.benchmarks.bench_compare [--nexrl compare_debug_dumps.py] [rows tokens]

Once both sides hold the same, once every log-prob and ratio differs. The reference is to read both
sides once, on one thread, in the same run: every tensor through its reader, every value looked at
once. To copy the files' bytes into memory stands beside it. With
NexRL's script (its path by --nexrl or NEXRL_SCRIPT) the comparison of its own files does too.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import psutil
import torch
from tests.benchmarks import nexrl_reference

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report import as_json
from stagescope_service.compare.report.nexrl import as_nexrl
from stagescope_service.compare.results import Verdict
from stagescope_service.compare.task_runner import thread_mapper
from stagescope_service.dumps.discover import open_dump
from stagescope_service.store.kept import Kept, write_kept

RANKS: Final = 8
MICROS: Final = 2
ROUNDS: Final = 7
GOAL: Final = 2.0


def shard(
    rows: int, tokens: int, seed: int, shift: float = 0.0
) -> dict[str, npt.NDArray[np.generic]]:
    """Tensors of one microbatch, float32 but for the mask: 7.3 MB at 64 x 4096.

    `shift` moves every log-prob, and so every ratio.
    """
    random = np.random.default_rng(seed)
    mask = (np.arange(tokens) < random.integers(tokens // 2, tokens, rows)[:, None]).astype(
        np.int64
    )
    drawn = -random.standard_exponential((rows, tokens), dtype=np.float32)
    log_probs = drawn + np.float32(shift)
    old = drawn + np.float32(1e-3) * random.standard_normal((rows, tokens), np.float32)
    return {
        "log_probs": log_probs,
        "entropy": random.random((rows, tokens), np.float32),
        "response_mask": mask,
        "old_log_probs": old,
        "advantages": random.standard_normal((rows, tokens), np.float32),
        "prob_ratio": np.exp(log_probs - old),
    }


def write_own(path: Path, rows: int, tokens: int, shift: float = 0.0) -> None:
    """Kept files, one a rank and microbatch."""
    for rank in range(RANKS):
        for micro in range(MICROS):
            values = shard(rows, tokens, MICROS * rank + micro, shift)
            first = (MICROS * rank + micro) * rows
            samples = [f"{(first + row) // 8}_{(first + row) % 8}" for row in range(rows)]
            job = {"run": "bench", "attempt_key": "1", "role": "actor", "rank": rank, "step": 0,
                   "stage": "actor_update", "microbatch": micro}  # fmt: skip
            write_kept(
                path / f"step_0/actor_update/0.0.0.{micro}"
                / f"actor_rank{rank}_{'0' * 12}_{micro}.safetensors",
                Kept(
                    tensors={n: (str(v.dtype), v.shape, v, None) for n, v in values.items()},
                    sections={
                        "forward_data": ["log_probs", "entropy", "response_mask"],
                        "is_loss": ["old_log_probs", "advantages", "prob_ratio", "response_mask"],
                        "loss": ["loss"],
                    },
                    scalars={"loss": 0.5}, strings={"sample_ids": samples}, meta={}, job=job,
                ),
            )  # fmt: skip


def write_nexrl(path: Path, rows: int, tokens: int) -> None:
    """The files that NexRL's script reads, of a self-hosted and of a Weaver training alike."""
    for kind in ("forward_data", "loss", "is_loss_debug", "old_log_probs"):
        (path / kind).mkdir(parents=True)
    for rank in range(RANKS):
        for micro in range(MICROS):
            values = {n: torch.from_numpy(v) for n, v in
                      shard(rows, tokens, MICROS * rank + micro).items()}  # fmt: skip
            place = {"step": 0, "rank": rank, "micro_idx": micro}
            name = f"step_000000_rank{rank}_micro{micro}.pt"
            forward = {n: values[n] for n in ("log_probs", "entropy", "response_mask")}
            debug = {n: values[n] for n in ("old_log_probs", "advantages", "prob_ratio")}
            debug["effective_valid"] = values["response_mask"]
            losses = {"loss": 0.5, "pg_loss": 0.25, "entropy_loss": 0.125}
            torch.save({**place, **forward}, path / "forward_data" / name)
            torch.save({**place, **losses}, path / "loss" / name)
            torch.save({**place, **debug, "loss": torch.tensor(0.5)}, path / "is_loss_debug" / name)
    whole = torch.from_numpy(shard(rows, tokens, 0)["old_log_probs"])
    torch.save({"step": 0, "old_log_probs": whole}, path / "old_log_probs" / "step_000000.pt")


def read_once(*sides: Path) -> None:
    """The floor: no comparison without reading every value of both sides."""
    for side in sides:
        dump = open_dump(side)
        for entry in dump.entries:
            for _, _, values, _ in dump.read(entry).tensors.values():
                values.max(initial=0)


def copy_bytes(*sides: Path) -> None:
    """Every byte of the files of both sides, copied into memory that is used again."""
    for side in sides:
        for path in sorted(side.rglob("*.*")):
            if path.is_file():
                data = np.empty(path.stat().st_size, np.uint8)
                with path.open("rb", buffering=0) as file:
                    file.readinto(data.data)


def compared(*sides: Path, workers: int, verdict: Verdict = Verdict.SAME) -> None:
    """The whole comparison, from listing the directories to the report."""
    result = compare([open_dump(side) for side in sides], mapper=thread_mapper(workers))
    assert result.verdict is verdict, result.reason
    as_json(result)


def compared_dumps(a: Path, b: Path) -> None:
    """What `compare-dumps` does but for printing, NexRL's keys and all."""
    dumps = {"self_hosted_dir": open_dump(a), "weaver_dir": open_dump(b)}
    result = compare(list(dumps.values()))
    assert result.verdict is Verdict.SAME, result.reason
    as_nexrl(as_json(result), dumps)


def reference(a: Path, b: Path) -> None:
    """What NexRL's script does."""
    nexrl_reference.compare(a, b, RANKS, MICROS)


def command(*words: str) -> None:
    """Run a command of this Python to its end."""
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)


def measure_nexrl(rows: int, tokens: int, script: str | None) -> None:
    """Print what NexRL's files take beside its script, in this process and by the command line."""
    with tempfile.TemporaryDirectory() as home:
        a, b = Path(home, "a"), Path(home, "b")
        for side in (a, b):
            write_nexrl(side, rows, tokens)
        size = sum(path.stat().st_size for path in a.rglob("*.pt"))
        ours = ("-c", "from stagescope.cli import main; main()", "compare-dumps",
                "--self_hosted_dir", str(a), "--weaver_dir", str(b), "--step", "0")  # fmt: skip
        theirs: tuple[str, ...] = (
            "-m", "tests.benchmarks.nexrl_reference", str(a), str(b), str(RANKS), str(MICROS)
        )  # fmt: skip
        if script:
            theirs = (script, "--self_hosted_dir", str(a), "--weaver_dir", str(b), "--step", "0")
        inside = script_of(script) if script else reference
        for where, works in (
            ("in this process", {
                "what NexRL's script does": functools.partial(inside, a, b),
                "stagescope compare-dumps": functools.partial(compared_dumps, a, b)}),
            ("by the command line", {
                "what NexRL's script does": functools.partial(command, *theirs),
                "stagescope compare-dumps": functools.partial(command, *ours)}),
        ):  # fmt: skip
            middle = table(f"NexRL's files, {size / 1e6:.1f} MB a side, {where}", works)
            one, other = middle.values()
            said = "met" if other <= one else "MISSED"
            sys.stdout.write(f"goal: no longer than NexRL's script: {said}\n")


def seconds(work: Callable[[], None]) -> float:
    """How long something takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@contextlib.contextmanager
def highest_memory() -> Iterator[list[int]]:
    """The most private memory that is taken meanwhile, beyond what was there, in bytes."""
    process, found, ended = psutil.Process(), [0], threading.Event()

    def private() -> int:
        known = process.memory_info()
        return int(known.rss - known.shared)

    base = private()

    def watch() -> None:
        while not ended.wait(0.002):
            found[0] = max(found[0], private() - base)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()


def script_of(path: str) -> Callable[[Path, Path], None]:
    """NexRL's own comparison, as its command line calls it but for printing."""
    spec = importlib.util.spec_from_file_location("compare_debug_dumps", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(one: Path, other: Path) -> None:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.getLogger(spec.name).setLevel(logging.ERROR)
            module.compare_dumps(one, None, other, step=0, num_ranks=RANKS, num_micros=MICROS)

    return run


def table(title: str, works: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Run each in turn, several times over; print medians and their ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()  # compiles, and warms the page cache
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(seconds(work))
    middle = {name: statistics.median(found) for name, found in times.items()}
    base = next(iter(middle.values()))
    out = sys.stdout
    out.write(f"\n{title}\n{'':<44}{'median ms':>10}{'best ms':>10}{'ratio':>8}\n")
    for name, value in middle.items():
        best = 1e3 * min(times[name])
        out.write(f"{name:<44}{1e3 * value:>10.1f}{best:>10.1f}{value / base:>8.2f}\n")
    return middle


def measure(
    kind: str,
    a: Path,
    b: Path,
    verdict: Verdict = Verdict.SAME,
) -> None:
    """Print the table of two dumps, whether the goal is met, and the memory."""
    out = sys.stdout
    files = [path for path in a.rglob("*.*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    largest = max(path.stat().st_size for path in files)
    reading = "read both sides once, 1 thread"
    works: dict[str, Callable[[], None]] = {
        reading: functools.partial(read_once, a, b),
        "copy the files' bytes, 1 thread": functools.partial(copy_bytes, a, b),
        **{
            f"stagescope compare, {workers} threads": functools.partial(
                compared, a, b, workers=workers, verdict=verdict
            )
            for workers in (1, 2)
        },
    }
    middle = table(f"{kind}: {len(files)} files, {size / 1e6:.1f} MB a side", works)
    ratio = min(middle[name] for name in works if name.startswith("stagescope")) / middle[reading]
    out.write(f"goal: at most {GOAL} x reading once: {'met' if ratio <= GOAL else 'MISSED'}\n")
    with highest_memory() as highest:
        compared(a, b, workers=2, verdict=verdict)
    out.write(
        f"private memory taken (files are mapped): {highest[0] / 1e6:.1f} MB; the largest file "
        f"has {largest / 1e6:.1f} MB, both sides {2 * size / 1e6:.1f} MB\n"
    )


def main() -> None:
    """Print times, ratios and the memory that the comparison takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nexrl", default=os.environ.get("NEXRL_SCRIPT"))
    parser.add_argument("size", nargs="*", type=int, default=[64, 4096])
    given = parser.parse_args()
    rows, tokens = given.size
    with tempfile.TemporaryDirectory() as home:
        for at, (kind, write) in enumerate((("safetensors", write_own), (".pt", write_nexrl))):
            a, b = Path(home, str(at), "a"), Path(home, str(at), "b")
            write(a, rows, tokens)
            write(b, rows, tokens)
            measure(f"{kind}, the same", a, b)
            if kind == "safetensors":
                other = Path(home, str(at), "other")
                write_own(other, rows, tokens, shift=1e-3)
                measure(f"{kind}, another", a, other, Verdict.DIFFERENT)
    for few_rows, few_tokens in ((4, 64), (rows, tokens)):
        measure_nexrl(few_rows, few_tokens, given.nexrl)


if __name__ == "__main__":
    main()
