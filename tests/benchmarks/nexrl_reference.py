"""What NexRL's compare_debug_dumps.py does by its documentation: a reference for measurements.

    python -m tests.benchmarks.nexrl_reference SELF_HOSTED WEAVER RANKS MICROS

Every rank and microbatch of one step: each file loaded with torch.load when it is needed; of each
tensor that both have max and mean of |d|, mean, std, min and max of both sides, allclose and the
correlation, in float32 over all values; of each loss its difference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

LOSSES = ("loss", "pg_loss", "entropy_loss")
FORWARD = ("log_probs", "entropy", "response_mask")
INTERMEDIATES = (
    "log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss", "effective_valid",
)  # fmt: skip


def load(path: Path) -> dict[str, Any]:
    """A file, or nothing where it is not there."""
    found: dict[str, object] = torch.load(path) if path.exists() else {}
    return found


def tensors(one: Any, other: Any) -> dict[str, object]:
    """The numbers of two tensors of one shape."""
    if one is None or other is None or one.shape != other.shape:
        return {"status": "not compared"}
    x, y = one.flatten().float(), other.flatten().float()
    apart = (x - y).abs()
    report: dict[str, object] = {"max": float(apart.max()), "mean": float(apart.mean())}
    for values in (x, y):
        for name in ("mean", "std", "min", "max"):
            report[f"{len(report)}_{name}"] = float(getattr(values, name)())
    report["is_close"] = bool(torch.allclose(x, y, atol=1e-5, rtol=1e-4))
    if x.std() > 1e-8 and y.std() > 1e-8:
        report["correlation"] = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    return report


def compare(a: Path, b: Path, ranks: int, micros: int) -> list[object]:
    """The report of step 0: forward passes, then losses, then what a loss was made of."""
    places = [(rank, micro) for rank in range(ranks) for micro in range(micros)]
    names = [f"step_000000_rank{rank}_micro{micro}.pt" for rank, micro in places]
    report: list[object] = []
    for name in names:
        one, other = (load(side / "forward_data" / name) for side in (a, b))
        report += [tensors(one.get(key), other.get(key)) for key in FORWARD]
    for name in names:
        one, other = (load(side / "loss" / name) for side in (a, b))
        report += [abs(one[key] - other[key]) for key in LOSSES if key in one and key in other]
    for name in names:
        one, other = load(a / "loss" / name), load(b / "is_loss_debug" / name)
        whole = load(a / "old_log_probs" / "step_000000.pt")
        sides = (one | whole, other)
        report += [tensors(*(side.get(key) for side in sides)) for key in INTERMEDIATES]
    return report


if __name__ == "__main__":
    first, second, ranks, micros = sys.argv[1:5]
    sys.stdout.write(json.dumps(compare(Path(first), Path(second), int(ranks), int(micros))))
