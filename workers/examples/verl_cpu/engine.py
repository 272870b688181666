"""The inference engine: transformers in bfloat16, beside a trainer that keeps float32 weights."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM


@dataclasses.dataclass(frozen=True)
class Generation:
    """Sampled tokens, the engine's own log-probs of them, and why it stopped."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: Literal["completed", "length"]


class Engine:
    """A causal language model without weights until `load`."""

    def __init__(self, model_path: str, seed: int) -> None:
        self._config = AutoConfig.from_pretrained(model_path)
        self._seed = seed
        self._model: torch.nn.Module | None = None
        self.version: int | None = None
        """The trainer's step whose weights are loaded."""

    def load(self, weights: Mapping[str, torch.Tensor], version: int | None) -> None:
        """Load all weights of the trainer's step `version`."""
        model = self._model
        if model is None:
            model = AutoModelForCausalLM.from_config(self._config)  # type: ignore[no-untyped-call]
            model = model.to(torch.bfloat16).eval()
        model.load_state_dict(weights)
        self._model, self.version = model, version

    def unload(self) -> None:
        """Release the weights' memory; `generate` fails until the next `load`."""
        self._model = None

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_tokens: int, seed: int) -> Generation:
        """Sample at temperature 1.

        The same seed, weights' version and prompt always give the same tokens.

        Raises:
            RuntimeError: no weights are loaded.
        """
        if self._model is None:
            raise RuntimeError("generate() before the first weights, or after sleep()")
        text = f"{self._seed} {self.version} {seed} {list(prompt_ids)}"
        generator = torch.Generator().manual_seed(random.Random(text).getrandbits(63))
        token_ids: list[int] = []
        log_probs: list[float] = []
        inputs, cache = torch.tensor([list(prompt_ids)]), None
        while len(token_ids) < max_tokens:
            output = self._model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            distribution = output.logits[0, -1].float().log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            token_ids.append(token)
            log_probs.append(float(distribution[token]))
            if token == self._config.eos_token_id:
                return Generation(token_ids, log_probs, "completed")
            inputs = torch.tensor([[token]])
        return Generation(token_ids, log_probs, "length")
