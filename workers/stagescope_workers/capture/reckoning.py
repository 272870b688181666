"""What an order would take on this rank, told before it is agreed on.

Asked of the background thread: training has only noted which model runs in which stage.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from stagescope.wire.captures import orders_msprobe
from stagescope.wire.schema import DUMP, Work
from stagescope_workers.transport.outbox import Outbox

_log = logging.getLogger("stagescope.workers")

_STAGES_KNOWN: Final = 64
_COPIED_A_SECOND: Final = 1e9

Said = tuple[str, dict[str, Any]]
"""A stage, and the fields of its estimate."""


class Models:
    """Which model ran last in which stage; holds none of them alive."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[weakref.ReferenceType[Any], ...]] = {}
        self._tokens: dict[str, int] = {}

    def note(self, stage: str, model: object) -> None:
        """Remember the module (or list of modules) of a stage."""
        if len(self._known) >= _STAGES_KNOWN and stage not in self._known:
            return
        parts = model if isinstance(model, list | tuple) else (model,)
        try:
            self._known[stage] = tuple(weakref.ref(part) for part in parts)
        except TypeError:  # something that only looks like a model
            self._known.pop(stage, None)

    def note_tokens(self, stage: str, count: int) -> None:
        """Remember the most tokens that a part of a stage has recorded values of."""
        if stage in self._tokens or len(self._tokens) < _STAGES_KNOWN:
            self._tokens[stage] = max(count, self._tokens.get(stage, 0))

    def tokens_of(self, stage: str) -> int | None:
        """Return how many tokens a part of a stage has, None where nothing was recorded."""
        return self._tokens.get(stage)

    def of(self, stages: Any) -> Iterator[tuple[str, list[Any]]]:
        """Yield the stages of an order whose model is known and alive, with it."""
        for stage, parts in [*self._known.items()]:
            if stages != "all" and stage not in stages:
                continue
            alive = [part for part in (reference() for reference in parts) if part is not None]
            if alive:
                yield stage, alive


def estimate_request(
    capture: Mapping[str, Any], models: Models, data_root: str | None
) -> list[Said]:
    """Return what an order takes here, stage by stage.

    `bytes` and `seconds` are of one step; `basis` is 'measured' (a capture of the kind ran in
    this process), 'model' or 'unknown'. `free_bytes` is what its disk has, without the reserve;
    `collective_timeout` is after how many seconds the ranks that wait give up, None where this
    process has no group.
    """
    # Only here: an order is rare, and these are not needed before the first.
    from stagescope_workers.capture import capture_estimate
    from stagescope_workers.capture.msprobe_config import resolve_config

    limits: Mapping[str, Any] = capture.get("limits") or {}
    about = {
        "free_bytes": _free_bytes(
            capture, data_root, capture_estimate.disk_reserve(limits.items())
        ),
        "collective_timeout": collective_timeout(),
    }
    found: list[Said] = []
    if not orders_msprobe(capture):
        return [(stage, {**cost.fields(), **about}) for stage, cost in _of_shards(capture, models)]
    config = resolve_config(capture, dump_path="", step=None)
    for stage, model in models.of(capture["stages"]):
        size = capture_estimate.ModelSize.of(model)
        tokens = limits.get("tokens") or models.tokens_of(stage)
        cost = capture_estimate.history.estimate(size, config, stage, tokens)
        if config.filtered and cost.basis == "model":
            # A list or a scope collects an unknown part of what is reckoned.
            cost = capture_estimate.Estimate(0, 0.0, "unknown", tokens)
        found.append((stage, {**cost.fields(), **about}))
    if found:
        return found
    stage = "all" if capture["stages"] == "all" else str(capture["stages"][0])
    return [(stage, {**capture_estimate.Estimate(0, 0.0, "unknown").fields(), **about})]


def _of_shards(capture: Mapping[str, Any], models: Models) -> list[tuple[str, Any]]:
    """Return what an order of parameters and gradients alone takes, by stage."""
    from stagescope_workers.capture.capture_estimate import Estimate
    from stagescope_workers.capture.shards import size_of

    found = []
    for stage, model in models.of(capture["stages"]):
        size = size_of(model, capture["parameters"]) + size_of(model, capture["gradients"])
        found.append((stage, Estimate(size, size / _COPIED_A_SECOND, "model")))
    unknown = "all" if capture["stages"] == "all" else str(capture["stages"][0])
    return found or [(unknown, Estimate(0, 0.0, "unknown"))]


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
    except Exception as error:  # private names: another torch may have others
        _log.debug("the collectives' time limit is not known: %r", error)
        return None


def _free_bytes(capture: Mapping[str, Any], data_root: str | None, reserve: int) -> int | None:
    given = capture.get("data_dir") or data_root
    if not given:
        return None
    directory = Path(given).expanduser().absolute()
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        status = os.statvfs(directory)
    except OSError:
        return None
    return max(0, status.f_bavail * status.f_frsize - reserve)


class RequestAnswers:
    """Answers orders that came too late, and those that are asked what they would take."""

    def __init__(self, outbox: Outbox) -> None:
        self.models = Models()
        self._outbox = outbox

    def missed(self, capture: Mapping[str, Any], step: int, stage: str) -> None:
        """Say that a capture came too late for a stage."""
        fields = Work(step, None, stage).fields()
        error = "the capture arrived after this stage had begun here"
        fields |= {"capture_id": capture["capture_id"], "state": "missed", "error": error}
        self._outbox.put(DUMP, fields)

    def estimate(self, capture: Mapping[str, Any], data_dir: str | None) -> None:
        """Say what an order would take here; in the background thread."""
        try:
            said = estimate_request(capture, self.models, data_dir)
            error = None
        except Exception as failure:  # the order may be what cannot be carried out
            said = [(str(capture["stages"][0]), {"basis": "unknown"})]
            error = f"{type(failure).__name__}: {failure}"[:2000]
        for stage, estimate in said:
            fields = Work(None, None, stage).fields()
            fields |= {"capture_id": capture["capture_id"], "state": "estimated"}
            self._outbox.put(DUMP, {**fields, "estimate": estimate, "error": error})
