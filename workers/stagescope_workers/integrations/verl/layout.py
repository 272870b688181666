"""Where a verl worker stands: its parallel coordinates, and which ranks hold the same rows."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from typing import Any, Final

_MEGATRON: Final = {
    "tp_rank": "get_tensor_model_parallel_rank",
    "tp_size": "get_tensor_model_parallel_world_size",
    "pp_rank": "get_pipeline_model_parallel_rank",
    "pp_size": "get_pipeline_model_parallel_world_size",
    "cp_rank": "get_context_parallel_rank",
    "cp_size": "get_context_parallel_world_size",
    "ep_rank": "get_expert_model_parallel_rank",
    "ep_size": "get_expert_model_parallel_world_size",
    "etp_rank": "get_expert_tensor_parallel_rank",
    "etp_size": "get_expert_tensor_parallel_world_size",
}


def describe(worker: Any, engine: Any) -> dict[str, Any]:
    """Return `init`'s options for a worker: layout and data_rank.

    Args:
        worker: verl's Worker, which knows its rank.
        engine: its model engine (FSDP, Megatron, VeOmni); one that says nothing gives nothing.
    """
    layout: dict[str, Any] = {"framework": "verl", "engine": _strategy(engine)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        layout["framework_version"] = importlib.metadata.version("verl")
    for name, ask in (
        ("dp_rank", "get_data_parallel_rank"),
        ("dp_size", "get_data_parallel_size"),
    ):
        with contextlib.suppress(Exception):
            layout[name] = int(getattr(engine, ask)())
    sequence = getattr(getattr(engine, "engine_config", None), "ulysses_sequence_parallel_size", 1)
    if isinstance(sequence, int) and sequence > 1:
        layout |= {"sp_size": sequence, "sp_rank": int(worker.rank) % sequence}
    layout |= _megatron()
    described: dict[str, Any] = {
        "layout": {name: value for name, value in layout.items() if value is not None}
    }
    if "dp_rank" in layout:
        described["data_rank"] = layout["dp_rank"]
    return described


def _strategy(engine: Any) -> str | None:
    strategy = getattr(getattr(engine, "engine_config", None), "strategy", None)
    return strategy if isinstance(strategy, str) else None


def _megatron() -> dict[str, int]:
    """Return what Megatron says, where this process has brought it up."""
    state: Any = sys.modules.get("megatron.core.parallel_state")
    found: dict[str, int] = {}
    with contextlib.suppress(Exception):
        if state is None or not state.model_parallel_is_initialized():
            return {}
    for name, ask in _MEGATRON.items() if state is not None else ():
        with contextlib.suppress(Exception):
            found[name] = int(getattr(state, ask)())
    return found
