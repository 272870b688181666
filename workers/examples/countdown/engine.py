"""The rollout engine: CTranslate2, created from the trainer's weights at every weight sync.

It computes in int8 (weights by row, activations by token) or float32 with its own kernels, so that
its log-probabilities really differ from the trainer's, without added noise.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# On processors without VNNI the oneDNN kernel saturates its 16-bit partial sums: a mean
# difference of 8.6e-2 was measured, where int8 arithmetic itself makes 7.2e-3 and MKL 7.1e-3.
os.environ.setdefault("CT2_USE_MKL", "1")

import ctranslate2
from ctranslate2.specs import common_spec, transformer_spec

from examples.countdown.config import MODEL, ROPE_THETA
from examples.countdown.tokenizer import ANSWER, CALL, PAD, TOKENS

Weights = Mapping[str, np.ndarray]
"""Name in the trainer's state dict -> float32 array."""


class Engine:
    """Samples from the policy at temperature 1 over the whole vocabulary."""

    def __init__(self, compute_type: str) -> None:
        self._compute_type = compute_type
        self._generator: Any = None
        self._seed: int | None = None

    @property
    def name(self) -> str:
        """The name of this instance, which distinguishes its rows from those of others."""
        return f"ctranslate2-{self._compute_type}"

    def load(self, weights: Weights, seed: int) -> None:
        """Load the trainer's weights; later samples depend only on `seed`."""
        # The converter scales arrays in place: without copies, it would change the caller's.
        spec = convert({k: v.copy() for k, v in weights.items()}, self._compute_type)
        # The engine seeds the sampler of each thread when the thread starts. With a new generator
        # after the seed, a resumed run samples the same as the first one.
        ctranslate2.set_random_seed(seed)
        self._seed = seed
        with tempfile.TemporaryDirectory(prefix="countdown-engine-") as folder:
            spec.save(folder)
            self._generator = ctranslate2.Generator(
                folder, compute_type=self._compute_type, inter_threads=1, intra_threads=1
            )

    def sampling(self, budget: int) -> dict[str, object]:
        """Return the sampling parameters of `generate`, by the field's names."""
        return {
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": budget, "seed": self._seed,
        }  # fmt: skip

    def generate(
        self, contexts: Sequence[Sequence[int]], budget: int
    ) -> list[tuple[list[int], list[float]]]:
        """Continue each context up to a call, an answer or `budget` tokens.

        Args:
            contexts: token ids of each row, at least one.
            budget: the maximal number of tokens to sample for a row.

        Returns:
            For each row the sampled ids, with the delimiter where there is one, and the engine's
            own log-probability of each (natural logarithm, temperature 1, whole vocabulary).
        """
        rows: list[tuple[list[int], list[float]]] = [([], []) for _ in contexts]

        def keep(result: Any) -> bool:
            ids, log_probs = rows[result.batch_id]
            ids.append(result.token_id)
            log_probs.append(result.log_prob)
            return False

        self._generator.generate_batch(
            [[TOKENS[index] for index in context] for context in contexts],
            max_length=budget,
            sampling_topk=0,
            sampling_temperature=1,
            end_token=[CALL, ANSWER],
            return_end_token=True,
            include_prompt_in_result=False,
            return_scores=True,  # without it the callback sees no log-probability
            callback=keep,
        )
        return rows

    def score(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return each row's log-probability of every token after the first, given those before it.

        Natural logarithm, temperature 1, whole vocabulary.
        """
        tokens = [[TOKENS[index] for index in row] for row in rows]
        return [scored.log_probs for scored in self._generator.score_batch(tokens)]


def convert(weights: Weights, compute_type: str) -> Any:
    """Return the CTranslate2 specification of a Qwen2 state dict (a few milliseconds).

    CTranslate2's own converter reads a saved Hugging Face directory through transformers, which
    takes seconds to import and is not needed here otherwise.
    """
    spec: Any = transformer_spec.TransformerDecoderModelSpec.from_config(
        MODEL["num_hidden_layers"],
        MODEL["num_attention_heads"],
        activation=common_spec.Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
        rotary_base=ROPE_THETA,
        num_heads_kv=MODEL["num_key_value_heads"],
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = weights["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = weights["model.norm.weight"]
    decoder.projection.weight = weights["lm_head.weight"]
    for index, layer in enumerate(decoder.layer):
        prefix = f"model.layers.{index}."
        _set_layer(layer, {k.removeprefix(prefix): v for k, v in weights.items() if prefix in k})
    spec.register_vocabulary(list(TOKENS))
    spec.config.bos_token = PAD
    spec.config.eos_token = ANSWER
    spec.config.unk_token = PAD
    spec.config.layer_norm_epsilon = MODEL["rms_norm_eps"]
    spec.validate()
    spec.optimize(quantization=compute_type)
    return spec


def _set_layer(layer: Any, weights: Weights) -> None:
    layer.self_attention.layer_norm.gamma = weights["input_layernorm.weight"]
    query_key_value, output = layer.self_attention.linear
    for kind in ("weight", "bias"):
        parts = [weights[f"self_attn.{name}_proj.{kind}"] for name in "qkv"]
        setattr(query_key_value, kind, np.concatenate(parts))
    output.weight = weights["self_attn.o_proj.weight"]
    layer.ffn.layer_norm.gamma = weights["post_attention_layernorm.weight"]
    layer.ffn.linear_0.weight = weights["mlp.gate_proj.weight"]
    layer.ffn.linear_0_noact.weight = weights["mlp.up_proj.weight"]
    layer.ffn.linear_1.weight = weights["mlp.down_proj.weight"]
