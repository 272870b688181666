"""Small HTTP servers with the shapes of vLLM, SGLang and others, as their public sources have them.

The model behind them is `log_prob_of`: a number for each token that depends on those before it, so
that what is scored must be what was generated, and a shift by one is seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

VOCABULARY = 64
BOS = 0


def log_prob_of(before: Sequence[int], token: int) -> float:
    """The model: log p(token | before)."""
    state = sum((index + 1) * (each + 3) for index, each in enumerate(before)) + 7 * token
    return -0.01 * (1 + state % 500)


def next_token(before: Sequence[int]) -> int:
    """The likeliest token."""
    return max(range(VOCABULARY), key=lambda token: log_prob_of(before, token))


def scores(row: Sequence[int]) -> list[float]:
    """The log-prob of each token of a row, from the second on."""
    return [log_prob_of(row[:index], row[index]) for index in range(1, len(row))]


class EngineServer:
    """A server of one shape; what it was asked is kept.

    Args:
        kind: "vllm", "sglang", "openai" (legacy completions with echo), or "old sglang".
        key: the bearer key that it wants.
        says: overrides of what it says of itself (SGLang).
        processed: whether the log-probs of what it generates are after temperature.
    """

    def __init__(
        self,
        kind: str,
        *,
        key: str = "",
        says: Mapping[str, object] | None = None,
        processed: bool = False,
    ) -> None:
        self.kind = kind
        self.key = key
        self.says = dict(says or {})
        self.processed = processed
        self.asked: list[tuple[str, Any]] = []
        self.authorization: list[str | None] = []
        self.health = 200
        self.broken: object = None
        self.app = FastAPI()
        self.app.add_api_route("/{path:path}", self.answer, methods=["GET", "POST"])

    async def answer(self, request: Request) -> Response:
        """Answer any request."""
        path = request.url.path
        body = await request.json() if request.method == "POST" else None
        self.asked.append((path, body))
        said = request.headers.get("authorization")
        self.authorization.append(said)
        if path == "/health":
            if self.health == 302:
                return RedirectResponse("/elsewhere", 302)
            return Response(status_code=self.health)
        if self.key and said != f"Bearer {self.key}":
            return JSONResponse({"error": f"Unauthorized: {said}"}, 401)
        if body is not None and self.broken is not None:
            return JSONResponse(self.broken)
        found = self._routes(path, body)
        return JSONResponse({"detail": "Not Found"}, 404) if found is None else JSONResponse(found)

    def _routes(self, path: str, body: Any) -> object:
        if path == "/v1/models":
            owner = {"vllm": "vllm", "sglang": "sglang"}.get(self.kind, "somebody")
            return {"data": [{"id": "m", "root": "/models/m", "owned_by": owner,
                              "max_model_len": 128}]}  # fmt: skip
        if "sglang" in self.kind:
            return self._sglang(path, body)
        if path == "/version" and self.kind == "vllm":
            return {"version": "0.33.0"}
        if path == "/v1/completions":
            return self._completion(body)
        if path == "/v1/chat/completions":
            return self._chat(body)
        return None

    # --- OpenAI's shape ---------------------------------------------------------------------

    def _completion(self, body: Mapping[str, Any]) -> object:
        prompt = _ids(body["prompt"])
        sampled = _sample(prompt, body["max_tokens"])
        row = [*prompt, *sampled]
        values = self._values(row, body.get("temperature"))
        listed = row if body.get("echo") else sampled
        values = values[-len(listed) :]
        choice: dict[str, object] = {
            "index": 0,
            "text": _text(listed),
            "finish_reason": "length",
            "logprobs": {
                "text_offset": list(range(len(listed))),
                "tokens": [_text([token]) for token in listed],
                "token_logprobs": values,
                "top_logprobs": [None if value is None else {} for value in values],
            },
        }
        if self.kind == "vllm":
            choice["prompt_logprobs"] = None
            if body.get("return_token_ids"):
                choice |= {"token_ids": sampled, "prompt_token_ids": prompt}
            if body.get("logprob_token_ids") is not None:
                [given] = body["logprob_token_ids"]
                value = log_prob_of(prompt, given)
                choice["logprobs"]["top_logprobs"] = [{f"token_id:{given}": value}]  # type: ignore[index]
            if body.get("prompt_logprobs") is not None:
                choice["prompt_logprobs"] = [None] + [
                    {str(token): {"logprob": value, "rank": 1, "decoded_token": _text([token])}}
                    for token, value in zip(prompt[1:], scores(prompt), strict=True)
                ]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
        return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": usage}

    def _chat(self, body: Mapping[str, Any]) -> object:
        content = body["messages"][-1]["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        text = "".join(part.get("text", "") for part in parts)
        images = sum(part["type"] == "image_url" for part in parts)
        answer = f"{images} images"
        entries = [{"token": each, "logprob": -0.5, "bytes": list(each.encode()),
                    "top_logprobs": []} for each in answer]  # fmt: skip
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer},
            "logprobs": {"content": entries},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": len(text) + 1, "completion_tokens": len(answer)}
        return {"choices": [choice], "usage": usage}

    def _values(self, row: Sequence[int], temperature: float | None) -> list[float | None]:
        factor = temperature if self.processed and temperature else 1.0  # of the likeliest token
        return [None, *(factor * value for value in scores(row))]

    # --- SGLang's own -----------------------------------------------------------------------

    def _sglang(self, path: str, body: Any) -> object:
        old = self.kind == "old sglang"
        if path == ("/get_model_info" if old else "/model_info"):
            return {"model_path": "/models/m", "is_generation": True, "weight_version": "3",
                    "has_image_understanding": False, **self.says}  # fmt: skip
        if path == ("/get_server_info" if old else "/server_info"):
            return {"version": "0.5.23", "dtype": "auto", "tp_size": 2, "api_key": "hidden"}
        if path == "/generate":
            return self._generate(body)
        return self._chat(body) if path == "/v1/chat/completions" else None

    def _generate(self, body: Mapping[str, Any]) -> object:
        prompt = body["input_ids"] if "input_ids" in body else _ids(body["text"])
        params = body["sampling_params"]
        sampled = _sample(prompt, params["max_new_tokens"])
        row = [*prompt, *sampled]
        values = self._values(row, params["temperature"])
        triples = [[value, token, None] for value, token in zip(values, row, strict=True)]
        start = body.get("logprob_start_len", -1)
        meta = {
            "id": "a",
            "finish_reason": {"type": "length", "length": params["max_new_tokens"]},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "weight_version": "3",
            "input_token_logprobs": triples[start : len(prompt)] if start >= 0 else [],
            "output_token_logprobs": triples[len(prompt) :],
        }
        return {"text": _text(sampled), "output_ids": sampled, "meta_info": meta}


def _ids(prompt: Any) -> list[int]:
    """Tokenise: a BOS and a token a character, as a server does with a text."""
    return list(prompt) if isinstance(prompt, list) else [BOS, *(ord(c) % 64 for c in prompt)]


def _text(ids: Sequence[int]) -> str:
    return "".join(chr(48 + token) for token in ids)


def _sample(prompt: Sequence[int], most: int) -> list[int]:
    row = list(prompt)
    for _ in range(most):
        row.append(next_token(row))
    return row[len(prompt) :]


def is_close(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two rows of log-probs are equal, NaN at the same places."""
    return len(one) == len(other) and all(
        math.isclose(a, b) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(one, other, strict=True)
    )
