"""What a capture will cost, before it is armed: bytes on disk and seconds, roughly.

Without a measurement it is reckoned from the model's modules and parameters and an assumed number
of tokens; once a capture of the same kind ran in this process, its measured figures are taken.
The constants come from dumps of a 4-layer Llama (width 256, 128 tokens, forward, backward, AdamW),
of which it gives 0.75 to 1.1 times the bytes at each task and level; for LLaMA2-7B, tensor, L1, one
sequence it gives 434 GB where the vendor measured 300. Attention scores and what is packed into a
stage's further passes are not in it. It is an order of magnitude: it keeps a dump of 300 GB from a
disk with 100 GB left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

from stagescope_workers.capture.msprobe_config import MsprobeConfig

ASSUMED_TOKENS: Final = 4096
"""Tokens of one forward pass, where nobody said how many there are."""

_FORWARD_ONLY: Final = ("_log_prob", "compute_values", "compute_rm_score", "generate")
_UPDATES: Final = ("_update",)
_ENTRY_SECONDS: Final = 5e-4
_BYTES_A_SECOND: Final = 2e8
_DISK_RESERVE: Final = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a model decides the size of its dump."""

    modules: int = 0
    tensors: int = 0
    parameter_bytes: int = 0
    width: int = 0
    """Bytes of one token's inputs and outputs over all modules with a weight."""
    hidden: int = 0

    @classmethod
    def of(cls, model: Any) -> ModelSize:
        """Measure a module or a list of them; None has no size."""
        parts = model if isinstance(model, list | tuple) else [model]
        size = cls()
        for part in parts:
            if part is not None:
                size = size._plus(part)
        return size

    def _plus(self, model: Any) -> ModelSize:
        modules = tensors = parameter_bytes = width = hidden = 0
        for module in model.modules():
            modules += 1
            for parameter in module.parameters(recurse=False):
                element, shape = parameter.element_size(), tuple(parameter.shape)
                tensors += 1
                parameter_bytes += parameter.numel() * element
                if len(shape) == 2:
                    width += sum(shape) * element if "mbedding" not in type(module).__name__ else 0
                    hidden = max(hidden, min(shape))
                elif len(shape) == 1:
                    width += 2 * shape[0] * element
        return ModelSize(
            self.modules + modules,
            self.tensors + tensors,
            self.parameter_bytes + parameter_bytes,
            self.width + width,
            max(self.hidden, hidden),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What a capture will take; `basis` is 'measured', 'model' or 'unknown'."""

    bytes: int
    seconds: float
    basis: str
    tokens: int | None = None
    assumed: bool = False
    """Whether nobody said, and no stage showed, how many tokens there are."""

    def fields(self) -> dict[str, Any]:
        """Return it as it travels with a dump's event."""
        return dataclasses.asdict(self)


def estimate(
    size: ModelSize, config: MsprobeConfig, stage: str, *, tokens: int = ASSUMED_TOKENS
) -> Estimate:
    """Reckon from the model what one stage's dump takes, before any list or scope.

    Args:
        size: of the model that runs in the stage.
        config: task, level and summary mode.
        stage: its name tells whether there is a backward pass and an optimizer step.
        tokens: in the forward passes of the stage.
    """
    if not size.modules or config.level in ("debug", "L2"):
        return Estimate(0, 0.0, "unknown")
    entries = _entries(size, config, stage)
    bytes_each = {"L0": 1150, "L1": 1150, "mix": 1200}.get(config.level, 1200)
    total: float = entries * (1000 if config.task == "structure" else bytes_each)
    if config.task in ("tensor", "diff_check"):
        total += _tensor_bytes(size, config, stage, tokens)
    slower = {"md5": 1.6, "xor": 1.2}.get(config.summary_mode, 1.0)
    seconds = entries * _ENTRY_SECONDS * slower + total / _BYTES_A_SECOND
    return Estimate(int(total), round(seconds, 3), "model", tokens)


def _passes(stage: str) -> tuple[bool, bool]:
    """Return (has a backward pass, has an optimizer step) of a stage; an unknown one has both."""
    forward_only = any(word in stage for word in _FORWARD_ONLY)
    return not forward_only, not forward_only


def _entries(size: ModelSize, config: MsprobeConfig, stage: str) -> int:
    backward, optimizer = _passes(stage)
    of_modules = size.modules * (2 if backward else 1) + (size.tensors if backward else 0)
    of_calls = size.modules * (5.4 if backward else 2.9) + (size.tensors * 9.1 if optimizer else 0)
    return int({"L0": of_modules, "L1": of_calls}.get(config.level, of_modules + of_calls))


def _tensor_bytes(size: ModelSize, config: MsprobeConfig, stage: str, tokens: int) -> float:
    backward, optimizer = _passes(stage)
    times = 2 if backward else 1
    activations = float(size.width) * tokens * times
    of_modules = activations * 1.6 + size.parameter_bytes * (2 if backward else 1)
    of_calls = activations * 2.2 + size.parameter_bytes * (times + (22 if optimizer else 0))
    return {"L0": of_modules, "L1": of_calls}.get(config.level, of_modules + of_calls)


class History:
    """The measured cost of the captures that ran in this process."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str, str, str, bool], tuple[int, float]] = {}

    @staticmethod
    def _key(config: MsprobeConfig, stage: str) -> tuple[str, str, str, str, bool]:
        return (stage, config.task, config.level, config.summary_mode, config.filtered)

    def add(self, config: MsprobeConfig, stage: str, size: int, seconds: float) -> None:
        """Keep what a complete capture took."""
        self._measured[self._key(config, stage)] = (size, seconds)

    def estimate(
        self, size: ModelSize, config: MsprobeConfig, stage: str, tokens: int | None = None
    ) -> Estimate:
        """Return the measured cost of such a capture, else the reckoned one.

        Where the tokens of the stage's forward passes are not known, `ASSUMED_TOKENS` are taken.
        """
        measured = self._measured.get(self._key(config, stage))
        if measured is None:
            cost = estimate(size, config, stage, tokens=tokens or ASSUMED_TOKENS)
            # Statistics take as much of few tokens as of many.
            by_token = config.task in ("tensor", "diff_check") and cost.basis == "model"
            return dataclasses.replace(cost, assumed=by_token and not tokens)
        return Estimate(measured[0], round(measured[1], 3), "measured")


history: Final = History()
"""What captures took in this process."""


def too_large(cost: Estimate, config: MsprobeConfig, free: int | None, reserve: int) -> str | None:
    """Return why a capture does not fit on its disk, or None.

    A list or a scope collects an unknown part of what was reckoned: then only the caps decide.
    """
    if free is None or (config.filtered and cost.basis != "measured"):
        return None
    if cost.bytes + reserve <= free:
        return None
    return (
        f"the dump is estimated at {cost.bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free "
        f"({reserve / 1e9:.1f} GB are kept for the training); name operators in list, choose task "
        "statistics, free space, or force the capture"
    )


def disk_reserve(limits: Iterable[tuple[str, Any]]) -> int:
    """Return the bytes that a capture leaves free on its disk."""
    value = dict(limits).get("reserve_bytes")
    return _DISK_RESERVE if value is None else int(value)
