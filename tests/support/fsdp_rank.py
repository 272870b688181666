"""One rank of a sharded model (FSDP2): captures a healthy pass and one that divides by zero.

`python -m tests.support.fsdp_rank RANK SIZE STORE OUT`: OUT/{level}/{healthy,faulty}/rank{RANK} get
the operator tables. Memory that was never written is full of NaN.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tests.support.dumps import table
from tests.support.families import NAN, leftovers
from tests.support.small_decoder import Block, forward_backward, small_decoder, token_ids
from torch import distributed
from torch.distributed.fsdp import fully_shard


class Faulty(Block):
    """A block that divides zero by zero."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(hidden)
        nothing = hidden - hidden
        return hidden + nothing / nothing


def main(rank: int, size: int, store: str, out: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    for level in ("L0", "L1", "mix"):
        for name in ("healthy", "faulty"):
            model = small_decoder()
            if name == "faulty":
                model.blocks[1].__class__ = Faulty
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            with leftovers(NAN):
                table(
                    out / level / name / f"rank{rank}",
                    model,
                    level=level,
                    body=lambda model=model: forward_backward(model, token_ids()),
                )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
