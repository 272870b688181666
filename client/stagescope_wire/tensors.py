"""The names of the tensors and lists of a payload, and the dtypes in which they travel.

A payload may have other names, too: they are kept, and no statistic reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

STREAM_TENSORS: Final[Mapping[str, str]] = {
    "rollout": "rollout_log_probs", "old": "old_log_probs", "current": "log_probs",
    "ref": "ref_log_probs", "recomputed": "recomputed_log_probs",
}  # fmt: skip
"""Stream -> the name of its tensor in a payload (`ref_log_prob` is read as `ref_log_probs`)."""
PAIRS: Final = (("old", "rollout"), ("current", "rollout"), ("old", "recomputed"))
"""(p, q) streams of the statistics of a payload, in order of preference: the mismatch comes from
the first available pair, the noise floor from ('old', 'recomputed')."""
UPDATE_PAIR: Final = ("current", "old")
"""(p, q) streams of an update's first mini-batch, where no update separates them."""
CURRENT_ALONE: Final = ("current", "current")
"""The same if only the current stream is recorded: sums by sample remain."""
ROLLOUT_ROUTES: Final = (
    "rollout_routed_experts", "routed_experts", "rollout_expert_indices", "expert_indices",
)  # fmt: skip
"""Names of the experts that the rollout chose, in order of preference."""
TRAINER_ROUTES: Final = (
    "trainer_routed_experts", "old_routed_experts", "trainer_expert_indices",
    "recorded_topk_idx",
)  # fmt: skip
"""Names of the experts that the trainer chose."""
ROUTE_TENSORS: Final = (*ROLLOUT_ROUTES, *TRAINER_ROUTES)
"""Routes, [rows, tokens, layers, K]: a probe counts them where they are, and sends the counts."""
ROUTING_FLIPS: Final = "routing_flips"
ROUTING_COUNTS: Final = "routing_counts"
ROUTING_SAME: Final = "routing_same"
ROUTING_WORST: Final = "routing_worst"
ROUTING_WORST_AT: Final = "routing_worst_at"
ROUTING_TENSORS: Final = (
    ROUTING_FLIPS, ROUTING_COUNTS, ROUTING_SAME, ROUTING_WORST, ROUTING_WORST_AT,
)  # fmt: skip
"""What a probe sends in place of routes."""
ROUTING_COLUMNS: Final = (
    "layer", "round", "tokens", "same", "ordered", "slots", "choices", "rollout_unset",
    "trainer_unset", "pairs", "earlier", "later",
)  # fmt: skip
"""What is counted of each layer and round. First compared tokens, those with
the same experts, those also in the same order, equal experts, all experts. Then tokens without a
choice in this layer. Then neighbouring tokens, and those of them whose rollout experts the trainer
chose one token earlier, or later."""
ROUTING_COUNT_COLUMNS: Final = ("row", *ROUTING_COLUMNS)
"""Columns of `routing_counts`, int32: the payload's row comes first, so that rows which count
elsewhere can be left out. In a large payload several rows follow each other under the first's."""
NO_ROLLOUT_ROUTE: Final = -1
NO_TRAINER_ROUTE: Final = -2
NO_ROUTE: Final = -3
"""Values of `routing_flips` of tokens that lack the route of one side, or of both."""
MAX_EXPERTS: Final = 1 << 15
"""Experts of a layer; routes with larger numbers are no routes."""
PAYLOAD_TENSORS: Final[Mapping[str, str]] = {
    "response_mask": "1 = model token, 0 = environment or padding; required with two streams",
    "responses": "token ids, as wide as the mask, or lists of rows beside a padded one",
    "positions": "position of each token in its sample (context-parallel parts, zigzag)",
    "round_ids": "round of each token, where the mask alone cannot tell it (split samples)",
    "turn_ids": "true turn of each token",
    "versions": "policy version of each token ([rows, tokens]) or sample ([rows]); texts are sent "
    "as `policy_versions` says",
    "token_offset": "[rows] position of a row's first token in its sample",
    "round_offset": "[rows] round of a row's first run in its sample",
    "rewards": "[rows] or as wide as the mask",
    "advantages": "as wide as the mask",
    "rollout_is_weights": "the importance weights that the loss applies, as wide as the mask",
    "clipped": "-1, 1 = the policy loss cuts this token's ratio at its lower, upper bound, so that "
    "it has no gradient; 0 = it does not; as wide as the mask",
    **dict.fromkeys(
        ROLLOUT_ROUTES,
        "the experts that the rollout chose, [rows, tokens, layers, K]; see routing.md. A probe "
        "sends counts of them",
    ),
    **dict.fromkeys(TRAINER_ROUTES, "the experts that the trainer chose, in the same form"),
    ROUTING_FLIPS: "number of layers in which rollout and trainer chose other experts for a token; "
    "below 0: one of them has no route. The probe makes it of the routes",
    ROUTING_COUNTS: "routes counted by row, layer and round, made by the probe",
    ROUTING_SAME: "[layers, layers] tokens whose experts are the same in the rollout's layer and "
    "the trainer's layer, made by the probe",
    ROUTING_WORST: "[tokens, 2, layers, K] routes of the worst tokens, made by the probe",
    ROUTING_WORST_AT: "[tokens] where these tokens are in the payload, made by the probe",
    "cu_seqlens": "[rows + 1] makes every other tensor of the payload packed [tokens]",
    "tokens": "token ids of whole trajectories, prompt included",
    "prompts": "token ids of the prompts",
    "loss_mask": "as wide as `tokens`: 1 = model token",
    "entropy": "of the distribution at each token, as wide as the mask",
    "values": "the critic's, as wide as the mask",
    "returns": "as wide as the mask",
    "prob_ratio": "exp(log_probs - old_log_probs) as the importance-sampling loss has it",
    "elementwise_loss": "that loss at each token, before it is summed or averaged",
    "effective_valid": "1 = this token counts in that loss",
    "input_ids": "what the model was given, [rows, tokens] or packed",
    "attention_mask": "as `input_ids`",
    "position_ids": "as `input_ids`",
}
"""The known tensor names; other tensors may also be recorded, and kept by their names."""
PER_TOKEN: Final = (
    *STREAM_TENSORS.values(), "ref_log_prob", "response_mask", "responses", "positions",
    "round_ids", "turn_ids", "advantages", "rollout_is_weights", "clipped", ROUTING_FLIPS,
)  # fmt: skip
"""Tensors with one value per token: in one payload they have the same rows and tokens."""
INTEGER_TENSORS: Final = frozenset({
    "responses", "positions", "round_ids", "turn_ids", "versions", "token_offset", "round_offset",
    "cu_seqlens", "tokens", "prompts", "input_ids", "attention_mask", "position_ids", "clipped",
    *ROUTE_TENSORS, *ROUTING_TENSORS,
})  # fmt: skip
"""Tensors of integers; an empty list under one of these names is also one of integers."""
RECENT_TENSORS: Final = frozenset({
    *STREAM_TENSORS.values(), "ref_log_prob", "response_mask", "prompts", "responses", "positions",
    "round_ids", "turn_ids", "versions", "token_offset", "round_offset", "rewards", "advantages",
    "rollout_is_weights", "clipped", "cu_seqlens", *ROUTING_TENSORS,
})  # fmt: skip
"""What statistics read, and the prompts, to score again: the ring keeps it without a request."""
PAYLOAD_STRINGS: Final[Mapping[str, str]] = {
    "sample_ids": "sample_uid of each row: unique in a step",
    "group_ids": "group_id of each row",
    "engine_ids": "the engine instance (server, replica) that sampled each row",
    "prompt_hashes": "a hash or dataset index of each row's prompt, the same in every step",
    "run_ids": "which of its group's samples each row is (sample_index; NexRL's run_id). Rows of "
    "one group and run are the turns of one trajectory. Each has one number in turn_ids",
}
"""Lists with one id per row; other lists of texts (answers, prompts) may also be recorded."""
WRITTEN_AFTER_HAND_OVER: Final = "written_after_hand_over"
"""Metadata field of a payload: tensors that are missing because their owner overwrote them."""
ROUTES_REFUSED: Final = "routes_refused"
"""Metadata field of a payload: why its routes were not counted."""
DTYPE_BYTES: Final[Mapping[str, int]] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
