"""vLLM's, SGLang's and OpenAI's shapes, as their public sources have them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
from tests.support.answering import serving
from tests.support.engines.servers import EngineServer, is_close, scores

from stagescope_wire.engines import HttpEngine, OpenAIEngine, Sampling, connect, is_processed
from stagescope_wire.errors import EngineError, InvalidInput
from stagescope_wire.nonfinite import Json

PROMPT = [0, 5, 9, 3]
KINDS = ("vllm", "openai", "sglang", "old sglang")


@contextlib.contextmanager
def engine_of(kind: str, **options: Json) -> Iterator[tuple[HttpEngine, EngineServer]]:
    server = EngineServer(kind, **options)
    with serving(server.app) as url, contextlib.closing(connect(url, timeout=10.0)) as engine:
        server.asked.clear()
        yield engine, server


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_generated_scores_the_same(kind: str) -> None:
    with engine_of(kind) as (engine, _):
        [made] = engine.generate([PROMPT], Sampling(max_tokens=6))
        assert made.problem == ""
        assert made.prompt_tokens == 4
        assert made.finish_reason == "length"
        sampled = list(made.token_ids) if made.token_ids else [ord(c) - 48 for c in made.text]
        row = [*PROMPT, *sampled]
        assert is_close(made.log_probs, scores(row)[3:])
        [given] = engine.score([row])
        assert math.isnan(given[0])
        assert is_close(given[1:], scores(row))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_come_in_the_order_of_the_prompts(kind: str) -> None:
    with engine_of(kind) as (engine, _):
        prompts = [[0, *range(1, length)] for length in range(2, 22)]
        made = engine.generate(prompts, Sampling(max_tokens=2))
        assert [each.prompt_tokens for each in made] == [len(prompt) for prompt in prompts]
        assert [len(row) for row in engine.score(prompts)] == [len(prompt) for prompt in prompts]


def test_the_request_to_vllm() -> None:
    with engine_of("vllm") as (engine, server):
        assert engine.info.kind == "vllm"
        assert (engine.info.model, engine.info.version) == ("m", "0.33.0")
        assert (engine.info.max_length, engine.info.processed) == (128, None)
        drawn = Sampling(max_tokens=3, temperature=0.7, top_p=0.9, top_k=5, seed=11, stop=("\n",))
        [made] = engine.generate(["ab"], drawn)
        assert made.token_ids is not None
        assert len(made.token_ids) == 3
        path, body = server.asked[-1]
        assert path == "/v1/completions"
        assert body == {
            "model": "m", "prompt": "ab", "max_tokens": 3, "temperature": 0.7, "top_p": 0.9,
            "top_k": 5, "seed": 11, "stop": ["\n"], "stream": False, "logprobs": 1,
            "return_token_ids": True, "min_p": 0.0, "repetition_penalty": 1.0,
        }  # fmt: skip
        assert made.prompt_ids is not None
        assert len(made.prompt_ids) == 3  # with its BOS
        engine.score([PROMPT])
        assert server.asked[-1][1]["prompt_logprobs"] == 0
        engine.using(adapter="policy").generate(["ab"], Sampling(salt="new"))
        asked = server.asked[-1][1]
        assert (asked["model"], asked["cache_salt"]) == ("policy", "new")
        assert asked["top_k"] == -1  # nothing is cut, whatever generation_config.json says
        engine.generate([PROMPT], Sampling(likeliest=20))
        asked = server.asked[-1][1]
        assert (asked["logprobs"], asked["return_tokens_as_token_ids"]) == (20, True)


def test_the_request_to_sglang() -> None:
    with engine_of("sglang") as (engine, server):
        info = engine.info
        assert (info.kind, info.model_path, info.version) == ("sglang", "/models/m", "0.5.23")
        assert (info.multimodal, info.processed, info.weight_version) == (False, True, "3")
        # Only what matters here is taken over: not its key.
        assert dict(info.settings) == {"dtype": "auto", "tp_size": 2}
        [made] = engine.generate([PROMPT], Sampling(max_tokens=3, temperature=0.7, seed=11))
        assert made.weight_version == "3"
        path, body = server.asked[-1]
        assert path == "/generate"
        assert body == {
            "input_ids": PROMPT,
            "sampling_params": {
                "max_new_tokens": 3, "temperature": 0.7, "top_p": 1.0, "top_k": -1,
                "sampling_seed": 11, "min_p": 0.0, "repetition_penalty": 1.0,
            },
            "return_logprob": True,
        }  # fmt: skip
        engine.using(adapter="policy").generate([PROMPT], Sampling(salt="new"))
        asked = server.asked[-1][1]
        assert (asked["lora_path"], asked["extra_key"]) == ("policy", "new")
        engine.score([PROMPT])
        assert server.asked[-1][1]["logprob_start_len"] == 0
        assert server.asked[-1][1]["sampling_params"]["max_new_tokens"] == 0


def test_a_salt_is_not_ignored() -> None:
    with (
        engine_of("openai") as (engine, _),
        pytest.raises(EngineError, match="has no salt for its prefix cache"),
    ):
        engine.generate([PROMPT], Sampling(salt="new"))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("processed", [True, False])
def test_whether_log_probs_are_processed_is_measured(kind: str, processed: bool) -> None:
    with engine_of(kind, processed=processed) as (engine, _):
        assert is_processed(engine) is processed


def test_a_given_next_token_is_scored_by_decoding() -> None:
    rows = [[*PROMPT, 7], [*PROMPT, 7, 11]]
    with engine_of("vllm") as (engine, server):
        assert isinstance(engine, OpenAIEngine)
        found = engine.score_next(rows, Sampling(temperature=0.7, salt="own"))
        assert is_close(found, [scores(row)[-1] for row in rows])
        bodies = sorted((body for _, body in server.asked), key=lambda body: len(body["prompt"]))
        assert [body["prompt"] for body in bodies] == [row[:-1] for row in rows]
        assert [body["logprob_token_ids"] for body in bodies] == [[7], [11]]
        first = bodies[0]
        assert (first["max_tokens"], first["logprobs"], first["cache_salt"]) == (1, 1, "own")
        server.broken = {"choices": [{"text": "x", "logprobs": {"top_logprobs": [{}]}}]}
        with pytest.raises(EngineError, match="no log-prob of the given next token 7"):
            engine.score_next(rows[:1], Sampling())
    with engine_of("openai") as (engine, _):
        assert isinstance(engine, OpenAIEngine)
        with pytest.raises(EngineError, match="openai does not return the log-prob of a given"):
            engine.score_next(rows, Sampling())


def test_a_text_is_tokenised_by_the_server() -> None:
    with engine_of("sglang") as (engine, server):
        [made] = engine.generate(["abc"], Sampling(max_tokens=1))
        assert server.asked[-1][1]["text"] == "abc"
        assert made.prompt_tokens == 4  # with its BOS: whoever compares must see that


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_images_go_as_data_urls(kind: str) -> None:
    with engine_of(kind) as (engine, server):
        parts = [
            {"type": "text", "text": "how many?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        ]
        [made] = engine.chat([[{"role": "user", "content": parts}]], Sampling(max_tokens=8))
        assert made.text == "1 images"
        assert len(made.log_probs) == len(made.tokens) == 8
        assert server.asked[-1][0] == "/v1/chat/completions"
        assert server.asked[-1][1]["logprobs"] is True


def choice(**fields: Json) -> dict[str, Json]:
    base = {"text": "x", "finish_reason": "length"}
    return {"choices": [base | fields], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}


def test_minus_infinity_is_read_and_an_id_in_a_token_s_name() -> None:
    with engine_of("vllm") as (engine, server):
        tokens = {"tokens": ["token_id:7", "token_id:8"], "token_logprobs": [-9999.0, -0.5]}
        server.broken = choice(logprobs=tokens)
        [made] = engine.generate([PROMPT])
        assert made.log_probs == (-math.inf, -0.5)
        assert made.token_ids == (7, 8)


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (choice(), "no log-probs"),
        (choice(logprobs={"tokens": ["a"], "token_logprobs": [-1.0]}), "1 log-probs for 2 tokens"),
        (
            choice(logprobs={"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0]}, token_ids=[1]),
            "2 log-probs for 1 tokens",
        ),
    ],
)
def test_mismatched_log_probs_are_reported(broken: Json, problem: str) -> None:
    with engine_of("vllm") as (engine, server):
        server.broken = broken
        assert problem in engine.generate([PROMPT])[0].problem


@pytest.mark.parametrize("kind", ["vllm", "openai", "sglang"])
@pytest.mark.parametrize(
    "broken",
    [
        [], {}, {"choices": []}, {"choices": [7]}, {"meta_info": {}},
        choice(logprobs={"tokens": ["a"], "token_logprobs": [-1.0]}),
        choice(prompt_logprobs=[None, {"999": {"logprob": -1.0}}, None, None]),
        choice(prompt_logprobs=[None] * 3),
        {"meta_info": {"input_token_logprobs": [[None, 0, None], [-1.0, 5, None]]}},
        {"meta_info": {"input_token_logprobs": [[None, 1, None]] * 4}},
    ],
)  # fmt: skip
def test_scores_of_other_tokens_are_refused(kind: str, broken: Json) -> None:
    with engine_of(kind) as (engine, server):
        server.broken = broken
        with pytest.raises(EngineError, match="returned"):
            engine.score([PROMPT])


def test_an_unreachable_and_another_server() -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        connect("http://127.0.0.1:9", timeout=5.0)
    server = EngineServer("none")
    server._routes = lambda path, body: None  # type: ignore[method-assign]
    with (
        serving(server.app) as url,
        pytest.raises(EngineError, match="not a known inference engine"),
    ):
        connect(url, timeout=5.0)


@pytest.mark.parametrize(
    "url", ["ftp://h:1", "http://user:pass@h:1", "http://h:1?key=7", "http://h:1#x", "", "http://"]
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(InvalidInput):
        connect(url)


@pytest.mark.parametrize("prompt", ["", [], [-1], [1.5], [True], [1 << 31], [0] * ((1 << 17) + 1)])
def test_an_invalid_prompt(prompt: Json) -> None:
    with engine_of("vllm") as (engine, server):
        with pytest.raises(InvalidInput):
            engine.generate([prompt])
        assert not server.asked


@pytest.mark.parametrize(
    "drawn",
    [
        {"max_tokens": 0}, {"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0},
        {"top_p": 1.1}, {"top_k": -1}, {"max_tokens": 1 << 20},
    ],
)  # fmt: skip
def test_invalid_sampling(drawn: dict[str, Json]) -> None:
    with pytest.raises(InvalidInput):
        Sampling(**drawn)
