"""SGLang's native `/generate`: token ids in, token ids with their log-probs out.

Each entry of `meta_info.output_token_logprobs` and `input_token_logprobs` is (log-prob, token id,
text or null); the first input token has null. Log-probs of output tokens are after temperature
unless the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB`; those of input tokens are raw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stagescope.engines.base import (
    Generation,
    Prompt,
    Sampling,
    check_ids,
    check_prompt,
)
from stagescope.engines.openai import OpenAIEngine
from stagescope.wire.errors import EngineError
from stagescope.wire.nonfinite import Json, JsonObject


class SGLangEngine(OpenAIEngine):
    """An SGLang server."""

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None
    ) -> list[Generation]:
        """Continue each prompt; see `Engine.generate`."""
        params = _params(sampling or Sampling())
        bodies = [
            {**_input(check_prompt(prompt)), "sampling_params": params, "return_logprob": True}
            for prompt in prompts
        ]
        return self._http.each(self._generate, bodies)

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the log-prob of each given token; see `Engine.score`."""
        return self._http.each(lambda row: self._score(check_ids(row)), rows)

    def _generate(self, body: JsonObject) -> Generation:
        answer, meta = self._post(body)
        entries = _entries(meta.get("output_token_logprobs"))
        if entries is None:
            raise self._unreadable("output_token_logprobs")
        ids = tuple(token for _, token in entries)
        generated = meta.get("completion_tokens")
        problem = ""
        if isinstance(generated, int) and generated != len(entries):
            problem = f"{len(entries)} log-probs for {generated} tokens"
        count, reason = meta.get("prompt_tokens"), meta.get("finish_reason")
        if isinstance(reason, Mapping):
            reason = reason.get("type")
        version = meta.get("weight_version")
        return Generation(
            text=str(answer.get("text") or ""),
            token_ids=ids,
            log_probs=tuple(value for value, _ in entries),
            prompt_tokens=count if isinstance(count, int) else None,
            finish_reason=None if reason is None else str(reason),
            weight_version=None if version is None else str(version),
            problem=problem if entries else "the server gave no log-probs",
        )

    def _score(self, row: list[int]) -> tuple[float, ...]:
        _, meta = self._post(
            {
                "input_ids": row,
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
        )
        entries = _entries(meta.get("input_token_logprobs"))
        if entries is None or [token for _, token in entries] != row:
            raise self._unreadable(f"input_token_logprobs of the {len(row)} given tokens")
        return (math.nan, *(value for value, _ in entries[1:]))

    def _post(self, body: JsonObject) -> tuple[JsonObject, JsonObject]:
        answer = self._http.post("/generate", body)
        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        if not isinstance(meta, Mapping):
            raise self._unreadable("meta_info")
        return answer, meta

    def _unreadable(self, what: str) -> EngineError:
        return EngineError(
            f"{self._http.url}/generate answers without {what}",
            expected="SGLang's answer to return_logprob",
        )


def _input(prompt: Prompt) -> dict[str, Json]:
    return {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}


def _params(settings: Sampling) -> dict[str, Json]:
    params: dict[str, Json] = {
        "max_new_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or -1,
    }
    if settings.seed is not None:
        params["sampling_seed"] = settings.seed
    if settings.stop:
        params["stop"] = list(settings.stop)
    return params


def _entries(value: object) -> list[tuple[float, int]] | None:
    """Return (log-prob, token id) of each entry; None if `value` is not a list of such entries."""
    if not isinstance(value, list):
        return None
    entries = []
    for entry in value:
        if not isinstance(entry, list) or len(entry) < 2 or type(entry[1]) is not int:
            return None
        log_prob = entry[0]
        is_number = isinstance(log_prob, int | float) and not isinstance(log_prob, bool)
        entries.append((float(log_prob) if is_number else math.nan, entry[1]))
    return entries
