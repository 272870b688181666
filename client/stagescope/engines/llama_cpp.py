"""llama.cpp's native `/completion`, because its OpenAI route does not return all token ids.

`tokens` are the generated ids, `completion_probabilities` the tokens with their log-probs: raw,
whatever the temperature. A token whose bytes are an incomplete character is merged with the next in
the second list, so the two lists are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from stagescope.engines.base import Generation, Prompt, Sampling, check_prompt
from stagescope.engines.openai import OpenAIEngine
from stagescope.wire.errors import EngineError
from stagescope.wire.nonfinite import Json, JsonObject

_REASONS: Final[Mapping[str, str]] = {"limit": "length", "eos": "stop", "word": "stop"}


class LlamaCppEngine(OpenAIEngine):
    """A llama.cpp server."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None
    ) -> list[Generation]:
        """Continue each prompt; see `Engine.generate`."""
        params = _params(sampling or Sampling())
        bodies = [{**params, "prompt": check_prompt(prompt)} for prompt in prompts]
        return self._http.each(self._generate, bodies)

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Raise: see `Engine.score`.

        Raises:
            EngineError: always; the server gives no log-probs of given tokens.
        """
        raise EngineError(
            f"llama.cpp at {self._http.url} gives no log-probs of given tokens",
            expected="an engine with prompt_logprobs or echo",
            advice="let this engine generate, and another one (--against) score",
        )

    def _generate(self, body: JsonObject) -> Generation:
        answer = self._http.post("/completion", body)
        if not isinstance(answer, Mapping) or not isinstance(answer.get("tokens"), list):
            raise EngineError(
                f"{self._http.url}/completion answers without tokens",
                expected="llama.cpp's answer to return_tokens",
            )
        ids = tuple(token for token in answer["tokens"] if type(token) is int)
        listed = answer.get("completion_probabilities")
        entries = [entry for entry in listed or () if isinstance(entry, Mapping)]
        problem = ""
        if not entries:
            problem = "the server gave no log-probs"
        elif tuple(entry.get("id") for entry in entries) != ids:
            problem = (
                f"log-probs of {len(entries)} of {len(ids)} tokens: those whose bytes are no whole "
                "character have none"
            )
        count, reason = answer.get("tokens_evaluated"), str(answer.get("stop_type"))
        return Generation(
            text=str(answer.get("content") or ""),
            tokens=tuple(str(entry.get("token")) for entry in entries),
            token_ids=ids,
            log_probs=tuple(_number(entry.get("logprob")) for entry in entries),
            prompt_tokens=count if type(count) is int else None,
            finish_reason=_REASONS.get(reason, reason),
            problem=problem,
        )


def _params(settings: Sampling) -> dict[str, Json]:
    params: dict[str, Json] = {
        "n_predict": settings.max_tokens,
        "temperature": settings.temperature,
        # Its defaults would cut the distribution (top_k 40, top_p 0.95, min_p 0.05).
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": 0.0,
        "n_probs": 1,
        "return_tokens": True,
        "stream": False,
    }
    if settings.seed is not None:
        params["seed"] = settings.seed
    if settings.stop:
        params["stop"] = list(settings.stop)
    return params


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)
