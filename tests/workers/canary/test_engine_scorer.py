"""What a canary asks of engines over HTTP, and in this process."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.answering import serving
from tests.support.engines import servers
from tests.support.engines.servers import EngineServer

from stagescope_wire.canary import BASE, CACHED, DECODED, DECODED_SCORED, FIXED, UNCACHED, Canary
from stagescope_workers.canary.engine_arms import Question, ask
from stagescope_workers.canary.engine_scorer import named
from stagescope_workers.canary.sequences import choose

QUESTION = Question(choose(servers.VOCABULARY, max_length=100))


def asked_over_http(kind: str, question: Question) -> tuple[Canary, list[tuple[str, Any]]]:
    server = EngineServer(kind)
    with serving(server.app) as url:
        engine = named(url)
        with engine.open() as scorer:
            assert scorer.name == engine.name
            return ask(scorer, question, lambda: None), server.asked


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_that_is_named_by_its_url(kind: str) -> None:
    found, asked = asked_over_http(kind, QUESTION._replace(adapter="policy"))
    assert found.problem == ""
    for row, values in zip(found.arms[FIXED].rows, found.arms[FIXED].log_probs, strict=True):
        assert values == pytest.approx(servers.scores(row))
    for one, other in ((DECODED, DECODED_SCORED), (CACHED, UNCACHED), (FIXED, BASE)):
        assert found.arms[one].rows == found.arms[other].rows
    field = {"vllm": "cache_salt", "sglang": "extra_key"}[kind]
    salts = [body[field] for _, body in asked if body and field in body]
    assert len(salts) > len(set(salts)) > 4  # a new one in each call
    # Those of the cached arm find the rollout's cache.
    adapter = {"vllm": "model", "sglang": "lora_path"}[kind]
    rollout = [body for _, body in asked if body and body.get(adapter) == "policy"]
    decoded = [body for body in rollout if field not in body and "seed" in str(body)]
    assert len(decoded) == 4


def test_an_engine_that_refuses_the_likeliest_tokens_is_asked_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routes = EngineServer._routes

    def refuse(server: EngineServer, path: str, body: Any) -> Any:
        if body and body.get("logprobs", 0) > 1:
            return None  # 404
        return routes(server, path, body)

    monkeypatch.setattr(EngineServer, "_routes", refuse)
    found, _ = asked_over_http("vllm", QUESTION)
    assert found.problem == ""
    assert DECODED in found.arms
