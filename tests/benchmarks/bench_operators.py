"""What a large dump.json costs: its operator table beside `json.load` of the same file.

Run with `python -m tests.benchmarks.bench_operators [MEGABYTES]` (100). The file is made of the
records of a small real shape, as msprobe indents them. Every case runs in a process of its own,
whose peak memory is its own; only the ratios of one run mean anything.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from stagescope_service.compare.operators.divergence import first_divergent
from stagescope_service.compare.operators.non_finite import first_non_finite
from stagescope_service.dumps.msprobe.operator_query import OperatorFilter, read_operators
from stagescope_service.dumps.msprobe.operator_table import write_operator_table


class Cost(NamedTuple):
    """Of one case: wall seconds, and megabytes of memory over those before it began."""

    seconds: float
    megabytes: float


def tensor(shape: list[int], number: int) -> dict[str, object]:
    """One tensor's record; its numbers differ from call to call."""
    return {
        "type": "torch.Tensor", "dtype": "torch.bfloat16", "shape": shape,
        "Max": 4.1014933586120605 + number * 1e-9, "Min": -3.153724431991577,
        "Mean": 0.06513579189777374, "Norm": 28.89289665222168, "requires_grad": True,
    }  # fmt: skip


def call(number: int) -> tuple[str, dict[str, object]]:
    """A linear layer's call; every seventh is an addition with a scalar."""
    if number % 7:
        inputs = [tensor([2, 4096, 4096], number), tensor([4096, 4096], number), None]
        name = f"Functional.linear.{number}.forward"
    else:
        inputs = [tensor([2, 4096, 4096], number), {"type": "float", "value": 0.5}]
        name = f"Tensor.__add__.{number}.forward"
    output = [tensor([2, 4096, 4096], number)]
    return name, {"input_args": inputs, "input_kwargs": {}, "output": output}


def generate(directory: Path, megabytes: int) -> int:
    """Write dump.json, stack.json and construct.json; return the calls in them."""
    names: list[str] = []
    size = 0
    directory.mkdir()
    with (directory / "dump.json").open("w") as file:
        file.write('{"task": "statistics", "level": "mix", "framework": "pytorch",\n "data": {\n')
        while size < megabytes << 20:
            name, record = call(len(names))
            size += file.write(",\n" * bool(names) + f'"{name}": {json.dumps(record, indent=1)}')
            names.append(name)
        file.write("\n }\n}")
    frames = [f"File /site-packages/torch/nn/f{i}.py, line {i}, in f, \n f()" for i in range(12)]
    frames.insert(3, "File /home/user/model.py, line 7, in forward, \n linear(x)")
    stacks = {str(i): [names[i::50], frames] for i in range(50)}
    (directory / "stack.json").write_text(json.dumps(stacks, indent=1))
    parents = {name: f"Module.layers.{i // 20}.Block.forward.0" for i, name in enumerate(names)}
    (directory / "construct.json").write_text(json.dumps(parents, indent=1))
    return len(names)


def measured(case: Callable[[], object]) -> Cost:
    """Run a case in a process of its own."""
    receiver, sender = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_measure, args=(case, sender))
    process.start()
    sender.close()
    cost: Cost = receiver.recv()
    process.join()
    return cost


def _measure(case: Callable[[], object], sender: Connection) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    case()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sender.send(Cost(seconds, (peak - before) / 1024))


def main(directory: Path, megabytes: int) -> dict[str, Cost]:
    """Measure and print; returns the cost by name."""
    calls = generate(directory / "dump", megabytes)
    dump, table = directory / "dump" / "dump.json", directory / "operators.parquet"
    cases: dict[str, Callable[[], object]] = {
        "json.load": lambda: json.loads(dump.read_text()),
        "operator table": lambda: write_operator_table(directory / "dump", table),
        "read one page": lambda: read_operators(table, OperatorFilter(name="*add*"), limit=100),
        "first non-finite": lambda: first_non_finite({0: table}),
        "first divergent": lambda: first_divergent(table, table),
    }
    found = {name: measured(case) for name, case in cases.items()}
    base = found["json.load"]
    print(f"{megabytes} MB of dump.json, {calls} calls, {table.stat().st_size >> 20} MB of Parquet")  # noqa: T201
    for name, cost in found.items():
        print(  # noqa: T201
            f"{name:20} {cost.seconds:8.2f} s {cost.seconds / base.seconds:6.2f} of json.load "
            f"{cost.megabytes:8.0f} MB {cost.megabytes / base.megabytes:6.2f}"
        )
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place), int(sys.argv[1]) if len(sys.argv) > 1 else 100)
