"""A rank's place in Megatron's parallel groups, where its process has initialised them."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Final

_FUNCTIONS: Final = {
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


def layout() -> dict[str, int]:
    """Return Megatron's layout columns, where this process has initialised it; else none."""
    state: ModuleType | None = sys.modules.get("megatron.core.parallel_state")
    found: dict[str, int] = {}
    with contextlib.suppress(Exception):
        if state is None or not state.model_parallel_is_initialized():
            return {}
    for name, function in _FUNCTIONS.items() if state is not None else ():
        with contextlib.suppress(Exception):
            found[name] = int(getattr(state, function)())
    return found
