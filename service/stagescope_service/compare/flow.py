"""Position of a tensor in the data flow of a step (`stagescope_wire.batch.data`), and its kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stagescope_service.dumps.records import SECTIONS
from stagescope_wire.batch.data import FLOW, flow_index

TEXTS: Final[Mapping[str, str]] = {
    "input": "prompt_text", "prompt": "prompt_text",
    "output": "response_text", "response": "response_text",
}  # fmt: skip
"""Texts of rows that replace tokens if a file has none -> name of the tensor they become."""
TARGETS: Final = "loss_fn_inputs/target_tokens"
"""Tokens of a datum, shifted left by one: its mask, log-probs and advantages align with them."""
TOKENS: Final = frozenset({
    "tokens", "prompts", "responses", "input_ids", "input_tokens", TARGETS, *TEXTS.values(),
})  # fmt: skip
TOKEN_IDS: Final = TOKENS - {"prompts", *TEXTS.values()}
"""Tensors that show which tokens were sampled; equal texts may come from other tokens."""
MASKS: Final = frozenset({"response_mask", "loss_mask", "attention_mask", "effective_valid"})
LOG_PROBS: Final = frozenset({
    "rollout_log_probs", "old_log_probs", "log_probs", "ref_log_probs", "recomputed_log_probs",
})  # fmt: skip
LOSSES: Final = frozenset({"loss", "pg_loss", "entropy_loss", "kl_loss", "value_loss"})
SAMPLE_SECTIONS: Final = ("trajectories", "batch_inputs")
"""Sections that hold the sampled tokens; they are compared before the others."""
IDENTIFYING_SECTIONS: Final = ("forward_data",)
"""Sections whose shards may identify the rows of other shards of their rank and part."""
NUMBER_SECTIONS: Final = ("loss", "metrics")
"""Sections of numbers, each of all rows of its part."""
NAMED_SECTIONS: Final = frozenset({"gradients", "parameters"})
"""Sections whose tensors are identified by name and have no rows."""
STATIONS: Final = (
    "tokens", "masks", "rollout log-probs", "rewards", "log-probs before the update", "values",
    "advantages", "log-probs in the update", "ratio", "loss", "gradients", "parameters", "other",
)  # fmt: skip
"""Names of the stations of the flow, in order."""

_UPDATE_SECTIONS: Final = frozenset({"forward_data", "is_loss"})
"""Sections of the forward pass of an update."""
_BEGINS: Final = (
    "prompts", "attention_mask", "rollout_log_probs", "rewards", "old_log_probs", "values",
    "advantages", "log_probs", "prob_ratio", "pg_loss", "gradient", "parameter",
)  # fmt: skip
_STARTS: Final = (*map(FLOW.index, _BEGINS), len(FLOW))
_SECTION_ORDER: Final = {section: at for at, section in enumerate(SECTIONS)}


def sort_key(section: str, name: str) -> tuple[int, int, str]:
    """Return a key that sorts tensors in the order of the data flow."""
    family = section.removesuffix("s") if section in NAMED_SECTIONS else name
    stage = "actor_update" if section in _UPDATE_SECTIONS else None
    return (flow_index(family, stage), _SECTION_ORDER.get(section, len(SECTIONS)), name)


def station(section: str, name: str) -> str:
    """Return a tensor's station in the flow."""
    position = sort_key(section, name)[0]
    return STATIONS[sum(start <= position for start in _STARTS) - 1]


def is_structural(name: str) -> bool:
    """Return whether a tensor holds tokens or a mask, which determine the other tensors' rows."""
    return name in TOKENS or name in MASKS
