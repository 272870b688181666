"""Dumps of a small decoder, made by msprobe itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tests.support.api import Rank, Service
from tests.support.small_decoder import (
    SmallDecoder,
    begin,
    forward_backward,
    small_decoder,
    token_ids,
)
from torch import nn
from torch.nn import functional

from stagescope_service.dumps.msprobe.operator_table import OperatorSummary, write_operator_table
from stagescope_wire.plan import CaptureRequest


def capture_request(**fields: object) -> CaptureRequest:
    """A request of these fields alone: the others do not matter to what is tested."""
    return cast("CaptureRequest", fields)


class ExtraCall(SmallDecoder):
    """Calls `linear` once more between its blocks, without changing what comes out."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = self.blocks[0](hidden)
        hidden = hidden + 0.0 * functional.linear(hidden, torch.ones(16, 16))
        logits: torch.Tensor = self.lm_head(self.blocks[1](hidden))
        return logits


class Masked(nn.Module):
    """Attention over -inf where the future is, as many models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.scores = Scores()
        self.lm_head = nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        logits: torch.Tensor = self.lm_head(torch.softmax(self.scores(hidden), -1) @ hidden)
        return logits


class Scores(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = hidden @ hidden.transpose(-1, -2)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(future, float("-inf")) + torch.zeros(())


def capture(
    directory: Path,
    model: nn.Module | None = None,
    *,
    level: str = "mix",
    task: str = "statistics",
    mode: str | None = None,
    body: Callable[[], object] | None = None,
    rank: int = 0,
) -> Path:
    """Capture one forward and backward pass; return the directory of the rank's files."""
    model = model if model is not None else small_decoder()
    section = {} if mode is None else {"summary_mode": mode}
    config = {"task": task, "level": level, task: section}
    work = {"attempt_key": "first", "data_root": str(directory), "rank": rank}
    armed = begin({"config": config}, model, **work)
    if body is None:
        forward_backward(model, token_ids())
    else:
        body()
    result = armed.finish(None)
    assert result["state"] == "complete", result["error"]
    return Path(result["path"])


def table(directory: Path, model: nn.Module | None = None, **arguments: Any) -> Path:
    """Capture, and write the operator table; return its path."""
    target = directory / "operators.parquet"
    write_operator_table(capture(directory, model, **arguments), target)
    return target


def tabled(directory: Path, text: str) -> tuple[Path, OperatorSummary]:
    """Write `text` as a dump.json and make its operator table."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "dump.json").write_text(text)
    target = directory / "operators.parquet"
    return target, write_operator_table(directory, target)


Argument = dict[str, object]
"""An argument or result of a call, as msprobe writes it to dump.json."""


def tensor_argument(
    low: float | None, high: float | None, *, shape: Sequence[int] = (2,), **fields: object
) -> Argument:
    """Describe a float32 tensor by its extremes; `fields` replace or add others."""
    return {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [*shape], "Max": high,
            "Min": low, "Mean": None, "Norm": None, **fields}  # fmt: skip


def table_of(directory: Path, calls: Mapping[str, object], *, level: str = "L1") -> Path:
    """Write calls (name -> record) as a dump.json; return its operator table."""
    return tabled(directory, json.dumps({"task": "statistics", "level": level, "data": calls}))[0]


def dumped(
    live: Service,
    rank: Rank,
    files: Path,
    step: int = 5,
    *,
    part: str = "0.0.0.0",
    stage: str = "actor_update",
    **said: object,
) -> Path:
    """Lay a dump where a capture puts it, and announce it; `part` only tells directories apart."""
    path = live.settings.data_path / "r" / f"{rank.sender.rank}-{step}-{part}" / "step0/rank0"
    shutil.copytree(files, path)
    fields = {"stage": stage, "step": step, "capture_id": "c1", "state": "complete", **said}
    rank.begin(stage, step)
    rank.say("dump", path=str(path), **fields)
    return path
