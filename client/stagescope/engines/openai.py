"""Engines that answer OpenAI's completions: vLLM, and others of that shape.

Two forms of log-probs are read: `logprobs.tokens` and `token_logprobs` (completions), and
`logprobs.content` with one entry a token (chat). Token ids come from `token_ids` (vLLM), from
entries' `id` (llama.cpp), or from tokens that are called `token_id:17`.

Given tokens are scored by vLLM's `prompt_logprobs`, else by `echo`. vLLM writes -9999 for minus
infinity (JSON has none): it is read as that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stagescope.engines.base import (
    EngineInfo,
    Generation,
    Prompt,
    Sampling,
    check_ids,
    check_prompt,
)
from stagescope.engines.http import EngineHttp
from stagescope.wire.errors import EngineError

_FLOOR: Final = -9999.0
_ID: Final = "token_id:"
_VLLM_OWN: Final = {"return_token_ids": True}


class OpenAIEngine:
    """An engine of that shape; `info.kind` says which, and so what it is asked for."""

    def __init__(self, http: EngineHttp, info: EngineInfo) -> None:
        self._http = http
        self._info = info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._info.kind} at {self._http.url}>"

    @property
    def info(self) -> EngineInfo:
        """What is known of it."""
        return self._info

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None
    ) -> list[Generation]:
        """Continue each prompt; see `Engine.generate`."""
        drawn = sampling or Sampling()
        bodies = [self._body(check_prompt(prompt), drawn) for prompt in prompts]
        return self._http.each(self._complete, bodies)

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the log-prob of each given token; see `Engine.score`."""
        if self._info.scores is False:
            raise EngineError(
                f"{self._info.kind} at {self._http.url} gives no log-probs of given tokens",
                expected="an engine with prompt_logprobs or echo",
                advice="let this engine generate, and another one (--against) score",
            )
        ask = self._by_prompt_log_probs if self._info.kind == "vllm" else self._by_echo
        return self._http.each(lambda row: ask(check_ids(row)), rows)

    def chat(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], sampling: Sampling | None = None
    ) -> list[Generation]:
        """Answer each conversation, a list of OpenAI's messages, images as `image_url` parts.

        The engine renders its own template, so that the tokens of the prompt are its own matter.
        """
        drawn = sampling or Sampling()
        bodies = [
            {**self._sampling(drawn), "messages": list(messages), "logprobs": True}
            for messages in conversations
        ]
        return self._http.each(self._answer, bodies)

    # --- asking ----------------------------------------------------------------------------

    def _sampling(self, drawn: Sampling) -> dict[str, Any]:
        body: dict[str, Any] = {
            "max_tokens": drawn.max_tokens,
            "temperature": drawn.temperature,
            "top_p": drawn.top_p,
            "stream": False,
            **(_VLLM_OWN if self._info.kind == "vllm" else {}),
        }
        if self._info.model is not None:
            body["model"] = self._info.model
        if drawn.top_k:
            body["top_k"] = drawn.top_k
        if drawn.seed is not None:
            body["seed"] = drawn.seed
        if drawn.stop:
            body["stop"] = list(drawn.stop)
        return body

    def _body(self, prompt: Prompt, drawn: Sampling) -> dict[str, Any]:
        return {**self._sampling(drawn), "prompt": prompt, "logprobs": 1}

    def _complete(self, body: Mapping[str, Any]) -> Generation:
        return self._read(*self._choice("/v1/completions", body))

    def _answer(self, body: Mapping[str, Any]) -> Generation:
        choice, usage = self._choice("/v1/chat/completions", body)
        message = choice.get("message")
        text = message.get("content") if isinstance(message, Mapping) else None
        return self._read({**choice, "text": text or ""}, usage)

    def _choice(
        self, path: str, body: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        answer = self._http.post(path, body)
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            raise EngineError(
                f"{self._http.url}{path} answers without choices",
                expected="OpenAI's shape of a completion",
            )
        usage = answer.get("usage")
        return choices[0], usage if isinstance(usage, Mapping) else {}

    # --- scoring ---------------------------------------------------------------------------

    def _by_prompt_log_probs(self, row: list[int]) -> tuple[float, ...]:
        body = self._body(row, Sampling(max_tokens=1, temperature=1.0))
        choice, _ = self._choice("/v1/completions", {**body, "prompt_logprobs": 0})
        given = choice.get("prompt_logprobs")
        if not isinstance(given, list) or len(given) != len(row):
            found = len(given) if isinstance(given, list) else "no"
            raise self._misread(row, f"{found} prompt_logprobs")
        found_ones = [math.nan]
        for token, said in zip(row[1:], given[1:], strict=True):
            entry = said.get(str(token)) if isinstance(said, Mapping) else None
            if not isinstance(entry, Mapping):
                raise self._misread(row, f"prompt_logprobs without token {token}")
            found_ones.append(_number(entry.get("logprob")))
        return tuple(found_ones)

    def _by_echo(self, row: list[int]) -> tuple[float, ...]:
        body = self._body(row, Sampling(max_tokens=1, temperature=1.0))
        choice, usage = self._choice("/v1/completions", {**body, "echo": True})
        _, ids, values = _log_probs(choice)
        most = len(row) + int(usage.get("completion_tokens") or 1)
        if not len(row) <= len(values) <= most or (ids and list(ids[: len(row)]) != row):
            raise self._misread(row, f"{len(values)} log-probs to an echo")
        # Where the server says nothing of the first token it says null, which is NaN already.
        return (math.nan, *values[1 : len(row)])

    def _misread(self, row: Sequence[int], found: str) -> EngineError:
        return EngineError(
            f"{self._http.url} answers {found} for {len(row)} given tokens",
            expected="one for each token as given",
            advice="the server tokenised the prompt again, or it gives no log-probs of a prompt",
        )

    # --- reading ---------------------------------------------------------------------------

    def _read(self, choice: Mapping[str, Any], usage: Mapping[str, Any]) -> Generation:
        tokens, ids, values = _log_probs(choice)
        said = usage.get("completion_tokens")
        problem = ""
        if not values:
            problem = "the server gave no log-probs"
        elif ids is not None and len(ids) != len(values):
            problem = f"{len(values)} log-probs for {len(ids)} tokens"
        elif isinstance(said, int) and said != len(values):
            problem = f"{len(values)} log-probs for {said} tokens"
        prompt_ids = choice.get("prompt_token_ids")
        prompt_tokens = (
            len(prompt_ids) if isinstance(prompt_ids, list) else usage.get("prompt_tokens")
        )
        reason = choice.get("finish_reason")
        return Generation(
            text=str(choice.get("text") or ""),
            tokens=tokens,
            token_ids=ids,
            log_probs=values,
            prompt_tokens=prompt_tokens if isinstance(prompt_tokens, int) else None,
            finish_reason=reason if isinstance(reason, str) else None,
            problem=problem,
        )


def _log_probs(
    choice: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[int, ...] | None, tuple[float, ...]]:
    """Return the tokens of an answer: their texts, ids (None: not said) and log-probs."""
    given = choice.get("logprobs")
    if not isinstance(given, Mapping):
        return (), None, ()
    if isinstance(given.get("content"), list):
        entries = [entry for entry in given["content"] if isinstance(entry, Mapping)]
        tokens = tuple(str(entry.get("token")) for entry in entries)
        values = tuple(_number(entry.get("logprob")) for entry in entries)
        ids: Any = [entry.get("id") for entry in entries]
    else:
        tokens = tuple(map(str, given.get("tokens") or ()))
        values = tuple(_number(value) for value in given.get("token_logprobs") or ())
        ids = None
    if _are_ids(choice.get("token_ids")):
        ids = choice["token_ids"]
    elif tokens and all(token.startswith(_ID) for token in tokens):
        digits = [token.removeprefix(_ID) for token in tokens]
        ids = [int(word) for word in digits if word.isdecimal()]
    return tokens, tuple(ids) if _are_ids(ids) else None, values


def _are_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(token) is int for token in given)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return -math.inf if value <= _FLOOR else float(value)
