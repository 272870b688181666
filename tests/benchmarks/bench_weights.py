"""What the checksum of a rank's weights costs, beside a plain copy of them and zlib.crc32.

    python tests/benchmarks/bench_weights.py [--mb 512] [--repeats 5]

Prints ratios to a copy of the same bytes into memory that is there already, which is the least
that a weight sync does: times themselves mean nothing on a shared machine. On a device (where
there is one) the copy is on the device. Then, what the service's comparison takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator

import torch

from stagescope_service.core.weights.verdicts import (
    WeightRecord,
    WeightTensor,
    compare,
    odd_replicas,
)
from stagescope_workers.checksum import checksum


def weights(nbytes: int, dtype: torch.dtype, rows: int = 4096) -> dict[str, torch.Tensor]:
    """Return about `nbytes` of weights: matrices of 32 MB and as many small vectors."""
    itemsize = torch.empty(0, dtype=dtype).element_size()
    columns = (32 << 20) // (rows * itemsize)
    made = {}
    for at in range(max(1, nbytes >> 25)):
        raw = torch.randint(0, 255, (rows * columns * itemsize,), dtype=torch.uint8)
        made[f"layers.{at}.weight"] = raw.view(dtype).view(rows, columns)
        made[f"layers.{at}.norm"] = torch.ones(columns, dtype=dtype)
    return made


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of `call`."""
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


def lines(nbytes: int, repeats: int) -> Iterator[str]:
    """Measure each form of the same bytes."""
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        named = weights(nbytes, dtype)
        tensors = [*named.values()]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        into = [tensor.clone() for tensor in tensors]
        copy = seconds(lambda: [a.copy_(b) for a, b in zip(into, tensors, strict=True)], repeats)  # noqa: B023
        summed = seconds(lambda: [checksum(tensor) for tensor in tensors], repeats)  # noqa: B023
        turned = [tensor.t() if tensor.dim() > 1 else tensor for tensor in tensors]
        across = seconds(lambda: [checksum(tensor) for tensor in turned], repeats)  # noqa: B023
        raw = [bytes(tensor.view(torch.uint8).reshape(-1).numpy()) for tensor in tensors]
        crc = seconds(lambda: [zlib.crc32(data) for data in raw], repeats)  # noqa: B023
        yield (
            f"{str(dtype).removeprefix('torch.'):9} {size / 1e6:6.0f} MB on the host: "
            f"x{summed / copy:.2f} of a copy  transposed x{across / copy:.2f}  "
            f"crc32 x{crc / copy:.2f}  ({size / summed / 1e9:.1f} GB/s)"
        )
    if torch.cuda.is_available():
        yield from _on_device(nbytes, repeats)


def _on_device(nbytes: int, repeats: int) -> Iterator[str]:
    tensors = [tensor.cuda() for tensor in weights(nbytes, torch.bfloat16).values()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    into = [torch.empty_like(tensor) for tensor in tensors]

    def waited(call: Callable[[], object]) -> Callable[[], object]:
        def whole() -> None:
            call()
            torch.cuda.synchronize()

        whole()  # warm
        return whole

    copying = waited(lambda: [a.copy_(b) for a, b in zip(into, tensors, strict=True)])
    summing = waited(lambda: [checksum(tensor) for tensor in tensors])
    copy, summed = seconds(copying, repeats), seconds(summing, repeats)
    queued = seconds(lambda: [checksum(tensor) for tensor in tensors], repeats)
    yield (
        f"bfloat16  {size / 1e6:6.0f} MB on the device: x{summed / copy:.2f} of a copy  "
        f"({size / summed / 1e9:.0f} GB/s); the training thread is free after {queued / summed:.0%}"
    )


def comparison(ranks: int, tensors: int, repeats: int) -> str:
    """Measure the comparison of a version, one tensor unlike on one rank of the rollout."""
    entries = tuple(
        WeightTensor(f"layers.{at}.weight", "bfloat16", (64, 64), None) for at in range(tensors)
    )

    def record(side: str, rank: int) -> WeightRecord:
        wrong = {7: 1} if (side, rank) == ("rollout", 1) else {}
        sums = [wrong.get(at, at * 977) for at in range(tensors)]
        layout = {"dp_rank": rank}
        return WeightRecord(
            side, rank, side, "exchanged", 1, 1, (0.0, "i", 1), entries, sums, layout
        )

    records = [record(side, rank) for side in ("trainer", "rollout") for rank in range(ranks)]
    took = seconds(lambda: (compare(records), odd_replicas(records)), repeats)
    return f"{2 * ranks} ranks with {tensors} tensors each are compared in {took * 1e3:.0f} ms"


def main() -> None:
    """Print one line for each form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)  # as the sums are formed
    for line in lines(given.mb << 20, given.repeats):
        sys.stdout.write(f"{line}\n")
    for ranks, tensors in ((8, 1000), (64, 1000), (64, 20_000)):
        sys.stdout.write(f"{comparison(ranks, tensors, given.repeats)}\n")


if __name__ == "__main__":
    main()
