"""What the whole statistics table costs, against what else computes a part of it.

    python -m tests.benchmarks.bench_statistics [rows tokens]

Timings of a shared machine mean little: every contender runs in turn, several times over, and the
table shows the median and best of each and their ratios to reading the three tensors once on one
thread. Where a ratio is promised, the last columns show the bound and whether the best keeps it.
The Ingestor computes on one thread; the line of two shows what a second one would bring.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from stagescope_service.statistics import Summary, TokenBatch, summarise, warm
from stagescope_wire.tensorfile import Array
from stagescope_workers.debug_metrics import calculate_debug_metrics

REPEATS = 7
READ = "read the tensors once"
BOUNDS = {
    "the whole table": 5.0,
    "the whole table, two threads": 3.0,
    "drop-in: 5 numbers and rounds": 6.0,
}
"""Wanted ratios to reading the tensors once."""
LOOP_ROWS = 2
"""Rows of the slice for the Python loop, whose time is scaled to the whole."""


def streams(rows: int, tokens: int, rounds: int = 8) -> tuple[Array, Array, Array]:
    """float32 p and q and an int64 mask with `rounds` rounds a row; 62.5 % are model tokens."""
    rng = np.random.default_rng(0)
    q = -rng.standard_exponential((rows, tokens), dtype=np.float32)
    noise = rng.standard_normal((rows, tokens), dtype=np.float32)
    p = np.minimum(q + np.float32(3e-3) * noise, np.float32(0))
    mask = np.zeros((rows, tokens), np.int64)
    step = tokens // rounds
    for i in range(rounds):
        mask[:, i * step + step // 8 : i * step + step * 6 // 8] = 1
    return p, q, mask


def read_once(p: Array, q: Array, mask: Array) -> None:
    """The floor: no statistics without reading the tensors."""
    for array in (p, q, mask):
        array.reshape(-1).max()


def verl_formula(p: torch.Tensor, q: torch.Tensor, mask: torch.Tensor) -> None:
    """What verl's calculate_debug_metrics computes, in torch: 5 of the table's numbers."""
    inside = mask.bool()
    actor, rollout = p.exp(), q.exp()
    gap = (actor - rollout).abs().masked_select(inside)
    both = torch.stack([actor.masked_select(inside), rollout.masked_select(inside)])
    _ = torch.corrcoef(both)[0, 1].item(), gap.max().item(), gap.mean().item(), gap.std().item()


def reduceat(p: Array, q: Array, mask: Array) -> None:
    """The means by round alone, in vectorised numpy."""
    edges = np.diff(mask, axis=1, prepend=0, append=0)
    starts, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    width = mask.shape[1]
    bounds = np.stack([starts @ [width, 1], ends @ [width, 1]], axis=1).reshape(-1)
    gap = np.abs(p - q).reshape(-1)
    sums = np.add.reduceat(np.append(gap, 0), bounds, dtype=np.float64)[::2]
    first = np.concatenate([[True], np.diff(starts[:, 0]) > 0])
    number = np.arange(len(starts))
    rounds = number - np.maximum.accumulate(np.where(first, number, 0))
    _ = np.bincount(rounds, sums) / np.bincount(rounds, ends[:, 1] - starts[:, 1])


def python_loop(p: Array, q: Array, mask: Array) -> None:
    """The means by round alone, one token at a time, as the pull request walks."""
    found: dict[int, list[float]] = {}
    for x, y, row in zip(*(torch.from_numpy(a) for a in (p, q, mask)), strict=True):
        number, inside = -1, False
        for i in range(row.shape[0]):
            on = row[i].item() == 1
            number += on and not inside
            inside = on
            if on:
                found.setdefault(number, []).append(abs(x[i].item() - y[i].item()))
    _ = {number: sum(values) / len(values) for number, values in found.items()}


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def clock(work: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def batch_of(tensors: dict[str, Array], first: int, last: int) -> TokenBatch:
    """The rows first to last as the service receives them."""
    wire = {
        name: (str(a.dtype), a[first:last].shape, a[first:last], None)
        for name, a in tensors.items()
    }
    return TokenBatch.from_tensors(
        wire, {"sample_ids": [f"sample-{row}" for row in range(first, last)]}
    )


def report(times: dict[str, list[float]]) -> None:
    """Print the table of times in milliseconds."""
    floor, median_floor = min(times[READ]), statistics.median(times[READ])
    _say(
        f"{'':34} {'median ms':>10} {'best ms':>10} {'median ratio':>13} {'best ratio':>11} "
        f"{'wanted':>8}"
    )
    for name, found in times.items():
        best, median = min(found), statistics.median(found)
        line = f"{name:34} {median:10.1f} {best:10.1f} {median / median_floor:13.1f}"
        line += f" {best / floor:11.1f}"
        if name in BOUNDS:
            kept = "kept" if best / floor <= BOUNDS[name] else "MISSED"
            line += f" {f'<= {BOUNDS[name]:g}':>8} {kept}"
        _say(line)


def main(rows: int, tokens: int) -> None:
    """Run every contender in turn and print the table."""
    torch.set_num_threads(1)
    p, q, mask = streams(rows, tokens)
    names = {"old_log_probs": p, "rollout_log_probs": q, "response_mask": mask}
    batch = batch_of(names, 0, rows)
    halves = batch_of(names, 0, rows // 2), batch_of(names, rows // 2, rows)
    tp, tq, tmask = (torch.from_numpy(a) for a in (p, q, mask))
    few = tuple(a[:LOOP_ROWS] for a in (p, q, mask))
    scale = {"python loop by round (scaled)": rows / LOOP_ROWS}
    compiled = clock(warm)
    with ThreadPoolExecutor(2) as pool:
        contenders: dict[str, Callable[[], object]] = {
            READ: lambda: read_once(p, q, mask),
            "the whole table": lambda: summarise(batch),
            "the whole table, two threads": lambda: Summary.merge(
                list(pool.map(summarise, halves))
            ),
            "verl's 5 numbers, torch": lambda: verl_formula(tp, tq, tmask),
            "means by round, numpy reduceat": lambda: reduceat(p, q, mask),
            "drop-in: 5 numbers and rounds": lambda: calculate_debug_metrics(
                names | {"responses": mask}
            ),
            "python loop by round (scaled)": lambda: python_loop(*few),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(REPEATS):
            for name, work in contenders.items():
                times[name].append(clock(work) * scale.get(name, 1.0))
    _say(
        f"{rows} x {tokens} tokens, {mask.mean():.1%} under the mask, 8 rounds a row; "
        f"compiling or loading took {compiled / 1e3:.1f} s"
    )
    report(times)


if __name__ == "__main__":
    size = [int(argument) for argument in sys.argv[1:3]]
    main(*(size if len(size) == 2 else (1024, 16384)))
