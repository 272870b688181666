"""What a canary costs the training: its trainer's score, and the call after a sync.

    python tests/benchmarks/bench_canary.py [--layers 8] [--hidden 512] [--rows 16] [--tokens 512]

Prints the score's time as a ratio to one forward pass of a training batch by the same model, since
times themselves mean nothing on a shared machine. Then `after_sync`, which starts a thread, against
an event that is only queued, and the tokens that an engine is asked for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from stagescope_workers.canary.after_syncs import WeightCanary
from stagescope_workers.canary.engine_arms import Cache, Decoded, Rows
from stagescope_workers.canary.sequences import choose
from stagescope_workers.canary.trainer_scores import score_with_model
from stagescope_workers.probe.lifecycle import init

VOCABULARY = 32_000


class Idle:
    """An engine that answers at once, and counts its tokens."""

    def __init__(self) -> None:
        self.name, self.max_length, self.processed = "idle", None, True
        self.cache: Cache = "salted"
        self.settings: dict[str, object] = {}
        self.tokens = 0

    def decode(self, rows: Rows, n: int, *, seed: int, temperature: float) -> list[Decoded]:
        """Return zeros."""
        self.tokens += sum(len(row) + n for row in rows.rows)
        return [Decoded((0,) * n, (0.0,) * n) for _ in rows.rows]

    def score(self, rows: Rows) -> list[tuple[float, ...]]:
        """Return zeros."""
        self.tokens += sum(map(len, rows.rows))
        return [(0.0,) * len(row) for row in rows.rows]

    def tokenise(self, text: str) -> None:
        """Tell nothing."""


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of `call`."""
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def trainer(given: argparse.Namespace) -> str:
    """Compare a canary's score with one forward pass of a training batch."""
    config: Any = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=given.hidden, intermediate_size=4 * given.hidden,
        num_hidden_layers=given.layers, num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    batch = torch.randint(0, VOCABULARY, (given.rows, given.tokens))
    sequences = choose(VOCABULARY, max_length=32_768)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=batch, use_cache=False)

    score_with_model(model, sequences.rows[:1])  # warm
    whole = seconds(forward, given.repeats)
    own = seconds(lambda: score_with_model(model, sequences.rows), given.repeats)
    return (
        f"{sequences.tokens} tokens of a canary take x{own / whole:.2f} of a forward pass of "
        f"{batch.numel()} tokens ({own * 1e3:.0f} ms, {whole * 1e3:.0f} ms)"
    )


def call(repeats: int) -> str:
    """Compare `after_sync` with a bare event, and count what the engine is asked for."""
    probe = init("bench-canary", attempt_key="bench", url="http://127.0.0.1:9")
    engine = Idle()
    canary: WeightCanary = probe.canary(engine=engine, sequences=choose(VOCABULARY))
    versions = iter(range(1_000_000))

    def asked() -> None:
        canary.after_sync(next(versions))
        canary.wait()

    asked()
    tokens = engine.tokens
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        canary.after_sync(next(versions))
        took.append(time.perf_counter() - begin)
        canary.wait()
    event = seconds(lambda: probe.log(step=1, loss=1.0), repeats)
    probe.close(0.0)
    own = statistics.median(took)
    return (
        f"after_sync takes x{own / event:.1f} of an event ({own * 1e6:.0f} us, {event * 1e6:.0f} "
        f"us); the engine is asked for {tokens} tokens"
    )


def main() -> None:
    """Print one line for each side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(f"{call(200)}\n{trainer(given)}\n")


if __name__ == "__main__":
    main()
