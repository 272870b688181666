"""Engines over HTTP: OpenAI's completions API (vLLM and others), llama.cpp and SGLang.

Two forms of log-probs are supported: `logprobs.tokens` and `token_logprobs` (completions), and
`logprobs.content` with one entry per token (chat). Token ids come from `token_ids` (vLLM), from the
entries' `id` (llama.cpp), or from tokens such as `token_id:17`.

Given tokens are scored with vLLM's `prompt_logprobs`, else with `echo`. vLLM writes -9999 for minus
infinity, which JSON lacks; it is read as -inf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeGuard, TypeVar

from stagescope_wire.engines.base import (
    GREEDY,
    EngineInfo,
    Generation,
    Prompt,
    Sampling,
    check_ids,
    check_prompt,
)
from stagescope_wire.engines.http import PARALLEL, EngineHttp
from stagescope_wire.errors import EngineError
from stagescope_wire.nonfinite import Json, JsonObject

if TYPE_CHECKING:
    from typing_extensions import Self

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")
_FLOOR: Final = -9999.0
_ID: Final = "token_id:"


class OpenAIEngine:
    """An engine with OpenAI's API; `info.kind` selects the options that it understands."""

    def __init__(
        self,
        http: EngineHttp,
        info: EngineInfo,
        *,
        adapter: str | None = None,
        concurrency: int = PARALLEL,
    ) -> None:
        self._http = http
        self.info = info
        self._adapter = adapter
        self._concurrency = concurrency

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.info.kind} at {self._http.url}>"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def using(self, *, adapter: str | None = None, concurrency: int | None = None) -> Self:
        """Return a client of the same server, over the same connections, with other options.

        Args:
            adapter: name of a LoRA adapter that the server has loaded; None: as this client.
            concurrency: most requests that are sent at once. With 1, the engine computes each
                request alone. None: as this client.
        """
        return type(self)(
            self._http,
            self.info,
            adapter=self._adapter if adapter is None else adapter,
            concurrency=self._concurrency if concurrency is None else concurrency,
        )

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling = GREEDY) -> list[Generation]:
        """Continue each prompt; see `Engine.generate`."""
        bodies = [self._body(check_prompt(prompt), sampling) for prompt in prompts]
        return self._each(self._complete, bodies)

    def _each(self, request: Callable[[_Item], _Answer], items: Sequence[_Item]) -> list[_Answer]:
        return self._http.each(request, items, self._concurrency)

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the log-prob of each given token; see `Engine.score`."""
        if self.info.scores is False:
            raise EngineError(
                f"{self.info.kind} at {self._http.url} returns no log-probs of given tokens",
                expected="an engine with prompt_logprobs or echo",
                advice="let this engine generate, and another one (--against) score",
            )
        score = self._by_prompt_log_probs if self.info.kind == "vllm" else self._by_echo
        return self._each(lambda row: score(check_ids(row)), rows)

    def chat(
        self, conversations: Sequence[Sequence[JsonObject]], sampling: Sampling = GREEDY
    ) -> list[Generation]:
        """Answer each conversation, a list of OpenAI's messages, images as `image_url` parts.

        The engine applies its own chat template and so determines the tokens of the prompt.
        """
        bodies = [
            {**self._sampling(sampling), "messages": list(messages), "logprobs": True}
            for messages in conversations
        ]
        return self._each(self._answer, bodies)

    # --- requests --------------------------------------------------------------------------

    def _sampling(self, settings: Sampling) -> dict[str, Json]:
        body: dict[str, Json] = {
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "stream": False,
            **({"return_token_ids": True} if self.info.kind == "vllm" else {}),
            **settings.optional(),
        }
        if (model := self._adapter or self.info.model) is not None:
            body["model"] = model
        if settings.top_k:
            body["top_k"] = settings.top_k
        if self.info.kind == "vllm":  # else the model's generation_config.json decides
            body |= {"top_k": settings.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0}
        if settings.salt is not None:
            if self.info.kind not in ("vllm", "sglang"):
                raise EngineError(
                    f"{self.info.kind} at {self._http.url} has no salt for its prefix cache",
                    expected="vLLM or SGLang, or a request without a salt",
                )
            body["cache_salt"] = settings.salt
        return body

    def _body(self, prompt: Prompt, settings: Sampling) -> dict[str, Json]:
        body = {**self._sampling(settings), "prompt": prompt, "logprobs": 1}
        if settings.likeliest:
            # As ids: texts of two tokens may be equal, and the answer has a mapping of them.
            body |= {"logprobs": settings.likeliest, "return_tokens_as_token_ids": True}
        return body

    def _complete(self, body: JsonObject) -> Generation:
        return self._read(*self._choice("/v1/completions", body))

    def _answer(self, body: JsonObject) -> Generation:
        choice, usage = self._choice("/v1/chat/completions", body)
        message = choice.get("message")
        text = message.get("content") if isinstance(message, Mapping) else None
        return self._read({**choice, "text": text or ""}, usage)

    def _choice(self, path: str, body: JsonObject) -> tuple[JsonObject, JsonObject]:
        answer = self._http.post(path, body)
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            raise EngineError(
                f"{self._http.url}{path} returned no choices",
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
        log_probs = [math.nan]
        for token, entries in zip(row[1:], given[1:], strict=True):
            entry = entries.get(str(token)) if isinstance(entries, Mapping) else None
            if not isinstance(entry, Mapping):
                raise self._misread(row, f"prompt_logprobs without token {token}")
            log_probs.append(_number(entry.get("logprob")))
        return tuple(log_probs)

    def _by_echo(self, row: list[int]) -> tuple[float, ...]:
        body = self._body(row, Sampling(max_tokens=1, temperature=1.0))
        choice, usage = self._choice("/v1/completions", {**body, "echo": True})
        _, ids, values = _log_probs(choice)
        most = len(row) + int(usage.get("completion_tokens") or 1)
        if not len(row) <= len(values) <= most or (ids and list(ids[: len(row)]) != row):
            raise self._misread(row, f"{len(values)} log-probs to an echo")
        # The first token has no log-prob: the server answers null or leaves it out.
        return (math.nan, *values[1 : len(row)])

    def _misread(self, row: Sequence[int], found: str) -> EngineError:
        return EngineError(
            f"{self._http.url} returned {found} for {len(row)} given tokens",
            expected="one for each token as given",
            advice="the server tokenised the prompt again, or it returns no log-probs of a prompt",
        )

    def score_next(self, rows: Sequence[Sequence[int]], sampling: Sampling) -> list[float]:
        """Return, for each row, the log-prob of its last token when it is decoded after the others.

        Unlike `score`, this reads the engine's prefix cache.

        Args:
            rows: two or more token ids each.
            sampling: temperature, top_p and top_k, which matter if log-probs are processed, and
                the salt of the prefix cache.

        Raises:
            EngineError: as `generate`, or the engine is not vLLM.
        """
        if self.info.kind != "vllm":
            raise EngineError(
                f"{self.info.kind} does not return the log-prob of a given next token",
                expected="vLLM, with logprob_token_ids",
            )
        settings = dataclasses.replace(sampling, max_tokens=1)

        def decode(row: list[int]) -> float:
            body = {
                **self._body(row[:-1], settings),
                "logprob_token_ids": [row[-1]],
                "return_tokens_as_token_ids": True,
            }
            choice, _ = self._choice("/v1/completions", body)
            given = choice.get("logprobs")
            entries = given.get("top_logprobs") if isinstance(given, Mapping) else None
            first = entries[0] if isinstance(entries, list) and entries else None
            found = first.get(f"{_ID}{row[-1]}") if isinstance(first, Mapping) else None
            if found is None:
                raise EngineError(
                    f"{self._http.url} returned no log-prob of the given next token {row[-1]}",
                    expected="a vLLM that knows logprob_token_ids",
                )
            return _number(found)

        return self._each(decode, [check_ids(row) for row in rows])

    # --- answers ---------------------------------------------------------------------------

    def _read(self, choice: JsonObject, usage: JsonObject) -> Generation:
        tokens, ids, values = _log_probs(choice)
        count = usage.get("completion_tokens")
        problem = ""
        if not values:
            problem = "the server returned no log-probs"
        elif ids is not None and len(ids) != len(values):
            problem = f"{len(values)} log-probs for {len(ids)} tokens"
        elif isinstance(count, int) and count != len(values):
            problem = f"{len(values)} log-probs for {count} tokens"
        given = choice.get("prompt_token_ids")
        prompt_ids = tuple(given) if _are_ids(given) else None
        prompt_tokens = usage.get("prompt_tokens") if prompt_ids is None else len(prompt_ids)
        reason = choice.get("finish_reason")
        return Generation(
            text=str(choice.get("text") or ""),
            tokens=tokens,
            token_ids=ids,
            log_probs=values,
            prompt_tokens=prompt_tokens if isinstance(prompt_tokens, int) else None,
            prompt_ids=prompt_ids,
            finish_reason=reason if isinstance(reason, str) else None,
            likeliest=_likeliest(choice),
            problem=problem,
        )


def _likeliest(choice: JsonObject) -> tuple[tuple[float, ...], ...]:
    given = choice.get("logprobs")
    found = given.get("top_logprobs") if isinstance(given, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        return ()
    return tuple(tuple(sorted(map(_number, each.values()), reverse=True)) for each in found)


def _log_probs(
    choice: JsonObject,
) -> tuple[tuple[str, ...], tuple[int, ...] | None, tuple[float, ...]]:
    """Return the texts, ids (None: unknown) and log-probs of an answer's tokens."""
    given = choice.get("logprobs")
    if not isinstance(given, Mapping):
        return (), None, ()
    if isinstance(given.get("content"), list):
        entries = [entry for entry in given["content"] if isinstance(entry, Mapping)]
        tokens = tuple(str(entry.get("token")) for entry in entries)
        values = tuple(_number(entry.get("logprob")) for entry in entries)
        ids: Json = [entry.get("id") for entry in entries]
    else:
        tokens = tuple(map(str, given.get("tokens") or ()))
        values = tuple(_number(value) for value in given.get("token_logprobs") or ())
        ids = None
    if _are_ids(choice.get("token_ids")):
        ids = choice["token_ids"]
    elif tokens and all(token.startswith(_ID) for token in tokens):
        digits = [token.removeprefix(_ID) for token in tokens]
        ids = [int(text) for text in digits if text.isdecimal()]
    return tokens, tuple(ids) if _are_ids(ids) else None, values


def _are_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _number(value: object) -> float:
    number = _plain(value)
    return -math.inf if number <= _FLOOR else number


def _plain(value: object) -> float:
    """Return a number of JSON; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value)


_REASONS: Final[Mapping[str, str]] = {"limit": "length", "eos": "stop", "word": "stop"}


class LlamaCppEngine(OpenAIEngine):
    """A llama.cpp server, by its native `/completion`: its OpenAI route returns not all token ids.

    `tokens` are the generated ids, `completion_probabilities` the tokens with their log-probs: raw,
    whatever the temperature. A token whose bytes are an incomplete character is merged with the
    next in the second list, so the two lists are compared.
    """

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling = GREEDY) -> list[Generation]:
        """Continue each prompt; see `Engine.generate`."""
        if self._adapter is not None:
            raise EngineError(
                f"llama.cpp at {self._http.url} selects no adapter by name",
                expected="an engine that serves adapters: vLLM or SGLang",
            )
        params = _llama_params(sampling)
        bodies = [{**params, "prompt": check_prompt(prompt)} for prompt in prompts]
        return self._each(self._generate, bodies)

    def _generate(self, body: JsonObject) -> Generation:
        answer = self._http.post("/completion", body)
        if not isinstance(answer, Mapping) or not isinstance(answer.get("tokens"), list):
            raise EngineError(
                f"{self._http.url}/completion returned no tokens",
                expected="llama.cpp's answer to return_tokens",
            )
        ids = tuple(token for token in answer["tokens"] if type(token) is int)
        listed = answer.get("completion_probabilities")
        entries = [entry for entry in listed or () if isinstance(entry, Mapping)]
        problem = ""
        if not entries:
            problem = "the server returned no log-probs"
        elif tuple(entry.get("id") for entry in entries) != ids:
            problem = (
                f"log-probs of {len(entries)} of {len(ids)} tokens: a token whose bytes are not a "
                "whole character has none"
            )
        count, reason = answer.get("tokens_evaluated"), str(answer.get("stop_type"))
        return Generation(
            text=str(answer.get("content") or ""),
            tokens=tuple(str(entry.get("token")) for entry in entries),
            token_ids=ids,
            log_probs=tuple(_plain(entry.get("logprob")) for entry in entries),
            prompt_tokens=count if type(count) is int else None,
            finish_reason=_REASONS.get(reason, reason),
            problem=problem,
        )


def _llama_params(settings: Sampling) -> dict[str, Json]:
    return {
        "n_predict": settings.max_tokens,
        "temperature": settings.temperature,
        # Its defaults would cut the distribution (top_k 40, top_p 0.95, min_p 0.05).
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": 0.0,
        "n_probs": 1,
        "return_tokens": True,
        "stream": False,
        **({} if settings.salt is None else {"cache_prompt": False}),
        **settings.optional(),
    }


class SGLangEngine(OpenAIEngine):
    """An SGLang server, by its native `/generate`: token ids in, token ids with log-probs out.

    Each entry of `meta_info.output_token_logprobs` and `input_token_logprobs` is (log-prob, token
    id, text or null); the first input token has null. Log-probs of output tokens are after
    temperature unless the server runs with `SGLANG_RETURN_ORIGINAL_LOGPROB`. Input tokens have raw
    log-probs.
    """

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling = GREEDY) -> list[Generation]:
        """Continue each prompt; see `Engine.generate`."""
        params = _sglang_params(sampling)
        fields: dict[str, Json] = {"sampling_params": params, "return_logprob": True}
        if sampling.salt is not None:
            fields["extra_key"] = sampling.salt
        bodies = [
            {"text" if isinstance(prompt, str) else "input_ids": check_prompt(prompt), **fields}
            for prompt in prompts
        ]
        return self._each(self._generate, bodies)

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the log-prob of each given token; see `Engine.score`."""
        return self._each(lambda row: self._score(check_ids(row)), rows)

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
            problem=problem if entries else "the server returned no log-probs",
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
        if self._adapter is not None:
            body = {**body, "lora_path": self._adapter}
        answer = self._http.post("/generate", body)
        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        if not isinstance(meta, Mapping):
            raise self._unreadable("meta_info")
        return answer, meta

    def _unreadable(self, what: str) -> EngineError:
        return EngineError(
            f"{self._http.url}/generate returned no {what}",
            expected="SGLang's answer to return_logprob",
        )


def _sglang_params(settings: Sampling) -> dict[str, Json]:
    return {
        "max_new_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or -1,
        # Else the model's generation_config.json decides.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        **settings.optional("sampling_seed"),
    }


def _entries(value: object) -> list[tuple[float, int]] | None:
    """Return (log-prob, token id) of each entry; None if `value` is not a list of such entries."""
    if not isinstance(value, list):
        return None
    entries = []
    for entry in value:
        if not isinstance(entry, list) or len(entry) < 2 or type(entry[1]) is not int:
            return None
        entries.append((_plain(entry[0]), entry[1]))
    return entries
