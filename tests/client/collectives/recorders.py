"""Dumps in the published layouts of the flight recorders of NCCL, HCCL and gloo."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORLD = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("ep", [0, 1]), "2": ("ep", [2, 3])}
PATH = "/job/trainer.py"


def call(
    group: str, sequence: int, operation: str = "all_reduce", *, done: bool = True,
    backend: str = "nccl", sizes: Sequence[int] = (4,), dtype: str = "Float", line: int = 10,
    p2p: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return an entry; `record_id` is set by `dump`."""
    return {
        "frames": [
            {
                "name": "all_reduce",
                "filename": "/x/site-packages/torch/distributed/c.py",
                "line": 1,
            },
            {"name": "step", "filename": PATH, "line": line},
        ],
        "pg_id": int(group),
        "process_group": (group, WORLD[group][0]),
        "collective_seq_id": 0 if p2p else sequence,
        "p2p_seq_id": sequence if p2p else 0,
        "op_id": sequence,
        "profiling_name": f"{backend}:{operation}",
        "time_created_ns": 1_795_950_870_437_870_767,
        "input_sizes": [[*sizes]],
        "input_dtypes": [dtype],
        "output_sizes": [[*sizes]],
        "output_dtypes": [dtype],
        "state": "scheduled" if backend == "gloo" else "completed" if done else "started",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": done,
        "timeout_ms": 600_000,
        "is_p2p": p2p,
    }


def dump(rank: int, calls: Sequence[dict[str, Any]], *, backend: str = "nccl") -> dict[str, Any]:
    """Return the dump of a rank."""
    entries = [{**each, "record_id": number} for number, each in enumerate(calls)]
    last: dict[str, int] = {}
    for each in entries:
        last[str(each["pg_id"])] = each["collective_seq_id"]
    return {
        "version": "2.4" if backend == "hccl" else "2.10",
        f"{backend}_comm_state": {},
        "pg_config": {
            name: {"name": name, "desc": described, "ranks": str(ranks)}
            for name, (described, ranks) in WORLD.items()
            if rank in ranks
        },
        "pg_status": {
            group: {"last_enqueued_collective": number, "last_started_collective": -1,
                    "last_completed_collective": number - 1}
            for group, number in last.items()
        },
        "entries": entries,
    }  # fmt: skip


def write(folder: Path, rank: int, document: dict[str, Any], *, backend: str = "nccl") -> Path:
    """Write a rank's file as the library does: a pickle of protocol 2, gloo's as JSON."""
    is_json = backend == "gloo"
    path = folder / (f"{rank}.json" if is_json else f"{backend}_trace_rank_{rank}")
    path.write_bytes(json.dumps(document).encode() if is_json else pickle.dumps(document, 2))
    return path
