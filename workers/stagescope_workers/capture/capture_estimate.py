"""Estimate what a capture costs before it is armed: bytes on disk and seconds, roughly.

Without a measurement the estimate follows from the model's modules and parameters and an assumed
number of tokens. Once a capture of the same kind ran in this process, its measured figures are
used. The constants come from dumps of a 4-layer Llama (width 256, 128 tokens, forward, backward,
AdamW). For it the estimate is 0.75 to 1.1 times the bytes at each task and level. For LLaMA2-7B,
tensor, L1, one sequence it is 434 GB, and the vendor measured 300. Attention scores and the
further passes of a stage are not included. It is an order of magnitude: it keeps a dump of 300 GB
from a disk with 100 GB left.

The background thread also estimates each capture request before the ranks agree on it, and reports
the result. Training only notes which model runs in which stage.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope_wire.captures import uses_msprobe
from stagescope_wire.plan import CaptureLimits, CaptureRequest
from stagescope_wire.schema import DUMP, Work
from stagescope_workers.capture import dump_paths
from stagescope_workers.capture.msprobe_config import MsprobeConfig, resolve_config
from stagescope_workers.capture.shards import shard_bytes
from stagescope_workers.transport.outbox import Outbox

ASSUMED_TOKENS: Final = 4096
"""Tokens of one forward pass, where neither the request nor an earlier stage gives a number."""

_FORWARD_ONLY: Final = ("_log_prob", "compute_values", "compute_rm_score", "generate")
_ENTRY_SECONDS: Final = 5e-4
_WRITE_BYTES_PER_SECOND: Final = 2e8
_DISK_RESERVE: Final = 256 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSize:
    """The properties of a model that determine the size of its dump."""

    modules: int = 0
    tensors: int = 0
    parameter_bytes: int = 0
    width: int = 0
    """Bytes of one token's inputs and outputs over all modules with a weight."""
    hidden: int = 0

    @classmethod
    def of_model(cls, model: object) -> ModelSize:
        """Measure a module or a list of them; None has no size."""
        parts: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
        modules = [each for part in parts if part is not None for each in part.modules()]
        tensors = parameter_bytes = width = hidden = 0
        for module in modules:
            for parameter in module.parameters(recurse=False):
                element, shape = parameter.element_size(), tuple(parameter.shape)
                tensors += 1
                parameter_bytes += parameter.numel() * element
                if len(shape) == 2:
                    width += sum(shape) * element if "mbedding" not in type(module).__name__ else 0
                    hidden = max(hidden, min(shape))
                elif len(shape) == 1:
                    width += 2 * shape[0] * element
        return cls(len(modules), tensors, parameter_bytes, width, hidden)


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated cost of a capture; `basis` is 'measured', 'model' or 'unknown'."""

    bytes: int
    seconds: float
    basis: str
    tokens: int | None = None
    assumed: bool = False
    """True where `tokens` is `ASSUMED_TOKENS`: neither given nor seen in an earlier stage."""


def estimate(
    size: ModelSize, config: MsprobeConfig, stage: str, *, tokens: int = ASSUMED_TOKENS
) -> Estimate:
    """Estimate one stage's dump from the model, before any list or scope.

    Args:
        size: size of the model that runs in the stage.
        config: task, level and summary mode.
        stage: its name determines whether there is a backward pass and an optimizer step.
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
    seconds = entries * _ENTRY_SECONDS * slower + total / _WRITE_BYTES_PER_SECOND
    return Estimate(int(total), round(seconds, 3), "model", tokens)


def _is_training(stage: str) -> bool:
    # An unknown stage counts as one with a backward pass and an optimizer step.
    return not any(part in stage for part in _FORWARD_ONLY)


def _entries(size: ModelSize, config: MsprobeConfig, stage: str) -> int:
    of_modules, of_calls = float(size.modules), 2.9 * size.modules
    if _is_training(stage):
        of_modules = 2.0 * size.modules + size.tensors
        of_calls = 5.4 * size.modules + 9.1 * size.tensors
    return int({"L0": of_modules, "L1": of_calls}.get(config.level, of_modules + of_calls))


def _tensor_bytes(size: ModelSize, config: MsprobeConfig, stage: str, tokens: int) -> float:
    # Passes over the activations; copies of the parameters by modules and by calls.
    passes, of_modules, of_calls = (2, 2, 24) if _is_training(stage) else (1, 1, 1)
    activations = float(size.width) * tokens * passes
    module_bytes = activations * 1.6 + size.parameter_bytes * of_modules
    call_bytes = activations * 2.2 + size.parameter_bytes * of_calls
    by_level = {"L0": module_bytes, "L1": call_bytes}
    return by_level.get(config.level, module_bytes + call_bytes)


class CostHistory:
    """The measured cost of the captures that ran in this process."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, str, str, str, bool], tuple[int, float]] = {}

    @staticmethod
    def _key(config: MsprobeConfig, stage: str) -> tuple[str, str, str, str, bool]:
        return (stage, config.task, config.level, config.summary_mode, config.filtered)

    def add(self, config: MsprobeConfig, stage: str, size: int, seconds: float) -> None:
        """Record the cost of a complete capture."""
        self._measured[self._key(config, stage)] = (size, seconds)

    def estimate(
        self, size: ModelSize, config: MsprobeConfig, stage: str, tokens: int | None = None
    ) -> Estimate:
        """Return the measured cost of such a capture, else the one estimated from the model.

        Where the tokens of the stage's forward passes are unknown, `ASSUMED_TOKENS` are assumed.
        """
        measured = self._measured.get(self._key(config, stage))
        if measured is None:
            cost = estimate(size, config, stage, tokens=tokens or ASSUMED_TOKENS)
            # The size of statistics does not depend on the number of tokens.
            by_token = config.task in ("tensor", "diff_check") and cost.basis == "model"
            return dataclasses.replace(cost, assumed=by_token and not tokens)
        return Estimate(measured[0], round(measured[1], 3), "measured")


history: Final = CostHistory()
"""The measured costs of this process's captures."""


def too_large(cost: Estimate, config: MsprobeConfig, free: int | None, reserve: int) -> str | None:
    """Return why a capture does not fit on its disk, or None.

    With a list or a scope an unknown part of the estimate is collected: then only the caps apply.
    """
    if free is None or (config.filtered and cost.basis != "measured"):
        return None
    if cost.bytes + reserve <= free:
        return None
    return (
        f"the dump is estimated at {cost.bytes / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free "
        f"({reserve / 1e9:.1f} GB are kept for the training). Name operators in list, choose task "
        "statistics, free space, or force the capture"
    )


def disk_reserve(limits: CaptureLimits) -> int:
    """Return the bytes that a capture leaves free on its disk."""
    value = limits.get("reserve_bytes")
    return _DISK_RESERVE if value is None else int(value)


_log = logging.getLogger("stagescope.workers")

_MAX_STAGES: Final = 64
_COPY_BYTES_PER_SECOND: Final = 1e9


class StageModels:
    """The model that ran last in each stage, as weak references, and its number of tokens."""

    def __init__(self) -> None:
        self._references: dict[str, tuple[weakref.ReferenceType[object], ...]] = {}
        self._tokens: dict[str, int] = {}

    def note_model(self, stage: str, model: object) -> None:
        """Remember the module (or list of modules) of a stage."""
        if len(self._references) >= _MAX_STAGES and stage not in self._references:
            return
        parts = model if isinstance(model, list | tuple) else (model,)
        try:
            self._references[stage] = tuple(weakref.ref(part) for part in parts)
        except TypeError:  # not a module: it takes no weak reference
            self._references.pop(stage, None)

    def note_tokens(self, stage: str, count: int) -> None:
        """Remember the largest number of tokens that a part of a stage recorded."""
        if stage in self._tokens or len(self._tokens) < _MAX_STAGES:
            self._tokens[stage] = max(count, self._tokens.get(stage, 0))

    def tokens(self, stage: str) -> int | None:
        """Return the number of tokens of a part of a stage; None where nothing was recorded."""
        return self._tokens.get(stage)

    def alive(self, stages: Sequence[str] | str) -> Iterator[tuple[str, list[object]]]:
        """Yield (stage, its modules) of the requested stages whose model is alive."""
        for stage, parts in [*self._references.items()]:
            if stages != "all" and stage not in stages:
                continue
            modules = [part for part in (reference() for reference in parts) if part is not None]
            if modules:
                yield stage, modules


def estimate_request(
    capture: CaptureRequest, models: StageModels, data_root: str | None
) -> list[tuple[str, dict[str, object]]]:
    """Return (stage, `estimate` field of a DUMP event) of a capture request in this process.

    The `bytes` and `seconds` are for one step. The `basis` is 'measured' (a capture of the kind ran
    in this process), 'model' or 'unknown'. The disk has `free_bytes` left, without the reserve.
    Waiting ranks give up after `collective_timeout` seconds; None where it has no group.
    """
    limits: CaptureLimits = capture.get("limits") or {}
    circumstances: dict[str, object] = {
        "free_bytes": _free_bytes(capture, data_root, disk_reserve(limits)),
        "collective_timeout": collective_timeout(),
    }
    if uses_msprobe(capture):
        costs = _msprobe_costs(capture, models, limits)
    else:
        costs = _shard_costs(capture, models)
    if not costs:
        stage = "all" if capture["stages"] == "all" else str(capture["stages"][0])
        costs = [(stage, Estimate(0, 0.0, "unknown"))]
    return [(stage, {**dataclasses.asdict(cost), **circumstances}) for stage, cost in costs]


def _msprobe_costs(
    capture: CaptureRequest, models: StageModels, limits: CaptureLimits
) -> list[tuple[str, Estimate]]:
    config = resolve_config(capture, dump_path="", step=None)
    costs = []
    for stage, model in models.alive(capture["stages"]):
        tokens = limits.get("tokens") or models.tokens(stage)
        cost = history.estimate(ModelSize.of_model(model), config, stage, tokens)
        if config.filtered and cost.basis == "model":
            # With a list or a scope an unknown part of the estimate is collected.
            cost = Estimate(0, 0.0, "unknown", tokens)
        costs.append((stage, cost))
    return costs


def _shard_costs(capture: CaptureRequest, models: StageModels) -> list[tuple[str, Estimate]]:
    costs = []
    for stage, model in models.alive(capture["stages"]):
        size = shard_bytes(model, capture.get("parameters") or ())
        size += shard_bytes(model, capture.get("gradients") or ())
        costs.append((stage, Estimate(size, size / _COPY_BYTES_PER_SECOND, "model")))
    return costs


def collective_timeout() -> float | None:
    """Return the time limit of the process's collectives, seconds; None where there are none."""
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_initialized():
            return None
        group = distributed.distributed_c10d._get_default_group()
        limits = [
            group._get_backend(device).options._timeout.total_seconds()
            for device in group._device_types
        ]
        return min(limits, default=None)
    except Exception as error:  # private names, which another version of torch may lack
        _log.debug("the time limit of the collectives cannot be read: %r", error)
        return None


def _free_bytes(capture: CaptureRequest, data_root: str | None, reserve: int) -> int | None:
    data_dir = capture.get("data_dir") or data_root
    if not data_dir:
        return None
    directory = Path(data_dir).expanduser().absolute()
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    free = dump_paths.free_bytes(directory)
    return None if free is None else max(0, free - reserve)


class CaptureReports:
    """Reports captures that arrived too late, and the estimates of requested ones."""

    def __init__(self, outbox: Outbox) -> None:
        self.models = StageModels()
        self._outbox = outbox

    def report_missed(self, capture: CaptureRequest, step: int, stage: str) -> None:
        """Report that a capture arrived after a stage had begun."""
        fields = Work(step, None, stage).fields()
        error = "the capture arrived after this stage had begun here"
        fields |= {"capture_id": capture["capture_id"], "state": "missed", "error": error}
        self._outbox.put(DUMP, fields)

    def report_estimate(self, capture: CaptureRequest, data_dir: str | None) -> None:
        """Report what a request would cost here; for the background thread."""
        try:
            estimates = estimate_request(capture, self.models, data_dir)
            error = None
        except Exception as failure:  # the request itself may be impossible
            estimates = [(str(capture["stages"][0]), {"basis": "unknown"})]
            error = f"{type(failure).__name__}: {failure}"[:2000]
        for stage, estimate in estimates:
            fields = Work(None, None, stage).fields()
            fields |= {"capture_id": capture["capture_id"], "state": "estimated"}
            self._outbox.put(DUMP, {**fields, "estimate": estimate, "error": error})
