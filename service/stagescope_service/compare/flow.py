"""Where a tensor of a dump lies in the flow of a step (`stagescope.flow`), and what kind it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stagescope.flow import FLOW, order_of
from stagescope_service.dumps.records import SECTIONS

TEXTS: Final[Mapping[str, str]] = {
    "input": "prompt_text", "prompt": "prompt_text",
    "output": "response_text", "response": "response_text",
}  # fmt: skip
"""Texts of rows that stand for tokens where a file has none -> the name under which they count."""
TARGETS: Final = "loss_fn_inputs/target_tokens"
"""Tokens of a datum that its mask, log-probs and advantages are of, each one place to the left."""
TOKENS: Final = frozenset({
    "tokens", "prompts", "responses", "input_ids", "input_tokens", TARGETS, *TEXTS.values(),
})  # fmt: skip
MASKS: Final = frozenset({"response_mask", "loss_mask", "attention_mask", "effective_valid"})
LOG_PROBS: Final = frozenset({
    "rollout_log_probs", "old_log_probs", "log_probs", "ref_log_probs", "recomputed_log_probs",
})  # fmt: skip
LOSSES: Final = frozenset({"loss", "pg_loss", "entropy_loss", "kl_loss", "value_loss"})
SAMPLING: Final = ("trajectories", "batch_inputs")
"""Sections that say which tokens were sampled: compared before the others."""
TELLING: Final = ("forward_data",)
"""Sections whose shards may say which rows others of their ranks and parts hold."""
COUNTED: Final = ("loss", "metrics")
"""Sections of numbers: each is of all the rows of its part."""
NAMED: Final = frozenset({"gradients", "parameters"})
"""Sections whose tensors are known by name; they have no rows."""
STATIONS: Final = (
    "tokens", "masks", "rollout log-probs", "rewards", "log-probs before the update", "values",
    "advantages", "log-probs in the update", "ratio", "loss", "gradients", "parameters", "other",
)  # fmt: skip
"""Names for stretches of the flow, in order."""

_PASSES: Final = frozenset({"forward_data", "is_loss"})
"""Sections of the pass that an update makes."""
_BEGINS: Final = (
    "prompts", "attention_mask", "rollout_log_probs", "rewards", "old_log_probs", "values",
    "advantages", "log_probs", "prob_ratio", "pg_loss", "gradient", "parameter",
)  # fmt: skip
_STARTS: Final = (*map(FLOW.index, _BEGINS), len(FLOW))
_SECTION_ORDER: Final = {section: at for at, section in enumerate(SECTIONS)}


def order(section: str, name: str) -> tuple[int, int, str]:
    """Return a key that sorts tensors as their data flows."""
    family = section.removesuffix("s") if section in NAMED else name
    stage = "actor_update" if section in _PASSES else None
    return (order_of(family, stage), _SECTION_ORDER.get(section, len(SECTIONS)), name)


def station(section: str, name: str) -> str:
    """Return the name of the stretch in which a tensor lies."""
    place = order(section, name)[0]
    return STATIONS[sum(start <= place for start in _STARTS) - 1]


def is_structural(name: str) -> bool:
    """Whether a tensor says which tokens there are: tokens and masks."""
    return name in TOKENS or name in MASKS
