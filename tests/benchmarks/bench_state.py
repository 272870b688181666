"""How many events a second the state machine takes, against building and hashing as many tuples.

    python -m tests.benchmarks.bench_state [ranks] [steps]

Only the ratios mean something: both are timed in one run on one machine, with the thresholds that
the coordinator gives the garbage collector. Times are CPU time: other processes take turns on the
machine. The last line says how the cost of an event grows from
few ranks to many; it must stay near 1.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import time

from stagescope_service.coordinator.actor import GC_THRESHOLDS
from stagescope_service.core.state import State
from stagescope_wire.schema import BEGIN, END, HELLO, SCHEMA, Event, Sender

WANTED = 8.0
"""Microseconds that an event of few ranks may take."""
STAGES = ("rollout_generate", "actor_compute_log_prob", "actor_update")
Wire = tuple[Sender, tuple[object, ...]]


def wires(ranks: int, steps: int) -> list[Wire]:
    """Make what a training sends: per rank and step three stages with two scalars each."""
    senders = [Sender(f"i{rank}", "r", "k", "actor", rank, started=1.0) for rank in range(ranks)]
    out: list[Wire] = [
        (sender, (SCHEMA, HELLO, 1, 1.0, 1.0, {"world_size": ranks})) for sender in senders
    ]
    seq = 1
    for step in range(1, steps + 1):
        for stage in STAGES:
            begin, end = seq + 1, seq + 2
            seq += 2
            for sender in senders:
                wall = float(seq)
                fields = {"step": step, "stage": stage}
                out.append((sender, (SCHEMA, BEGIN, begin, wall, wall, fields)))
                said = {**fields, "begin_seq": begin, "status": "ok"}
                said["scalars"] = {"loss": 1.0, "entropy": 2.0}
                out.append((sender, (SCHEMA, END, end, wall, wall, said)))
    return out


def handle(sent: list[Wire]) -> float:
    """Return the CPU seconds that the state machine takes, parsing included."""
    state = State()
    gc.collect()
    start = time.thread_time()
    for sender, wire in sent:
        state.handle(sender, Event.parse(wire), 0.0)
    return time.thread_time() - start


def reference(sent: list[Wire]) -> float:
    """Return the CPU seconds for building a tuple of each event and hashing its text."""
    start = time.thread_time()
    for sender, wire in sent:
        kept = (sender.incarnation, *wire)
        hashlib.blake2b(repr(kept).encode(), digest_size=12).digest()
    return time.thread_time() - start


def measure(ranks: int, steps: int, repeats: int = 3) -> tuple[float, float]:
    """Return microseconds an event, and the ratio to the reference (the best of some runs)."""
    sent = wires(ranks, steps)
    took = min(handle(sent) for _ in range(repeats))
    base = min(reference(sent) for _ in range(repeats))
    return took / len(sent) * 1e6, took / base


def main() -> None:
    """Print the table."""
    gc.set_threshold(*GC_THRESHOLDS)
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    few = 10
    found = {}
    for ranks, count in ((few, many * steps // few), (many, steps)):
        micros, ratio = measure(ranks, count)
        found[ranks] = micros
        print(  # noqa: T201
            f"{ranks:5d} ranks x {count:5d} steps: {1e6 / micros:9.0f} events/s, "
            f"{micros:6.2f} us an event (wanted: <= {WANTED:g}), {ratio:5.2f} x reference"
        )
    print(f"cost of an event, {many} ranks to {few}: {found[many] / found[few]:.2f} x")  # noqa: T201


if __name__ == "__main__":
    main()
