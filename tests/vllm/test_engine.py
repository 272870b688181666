"""Our client of vLLM with a real one: ids, scores, prefix cache, adapters, batches, processing."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.engines.tiny_qwen import BOS, VOCABULARY
from tests.support.engines.vllm_server import ADAPTER, BLOCK, NAME, VllmServer
from tests.vllm.conftest import Folders

from stagescope_wire.engines import Generation, OpenAIEngine, Sampling, is_processed
from stagescope_wire.errors import EngineError

_RANDOM = np.random.default_rng(1)
LONG = _RANDOM.integers(2, VOCABULARY, size=3 * BLOCK + 5).tolist()
SHORT = [_RANDOM.integers(2, VOCABULARY, size=size).tolist() for size in range(4, 20)]
GREEDY = Sampling(max_tokens=16)


@pytest.fixture
def engine(dense32: VllmServer) -> OpenAIEngine:
    """A client of the dense model in float32, whose log-probs are exactly repeatable."""
    return dense32.connect()


def _greedy(engine: OpenAIEngine, salt: str | None = None) -> Generation:
    [answer] = engine.generate([LONG], Sampling(max_tokens=16, salt=salt))
    return answer


def test_it_says_what_it_serves(engine: OpenAIEngine, dense_folders: Folders) -> None:
    info = engine.info
    assert (info.kind, info.version, info.model) == ("vllm", "0.32.0", NAME)
    assert (info.adapters, info.model_path) == ((ADAPTER,), str(dense_folders.base))
    assert (info.scores, info.max_length, info.weight_version) == (True, 512, "default")


def test_a_prompt_of_ids_comes_back_with_ids_and_log_probs(engine: OpenAIEngine) -> None:
    [answer] = engine.generate([LONG], Sampling(max_tokens=8, temperature=1.0, seed=5))
    assert answer.prompt_ids == tuple(LONG)
    assert answer.token_ids is not None
    assert len(answer.token_ids) == len(answer.log_probs) == 8
    [scores] = engine.score([[*LONG, *answer.token_ids]])
    assert scores[len(LONG) :] == answer.log_probs


def test_a_text_shows_the_bos_that_a_server_adds(dense32: VllmServer, engine: OpenAIEngine) -> None:
    [right] = engine.generate(["ab"], GREEDY)
    with dense32.adding_bos():
        [wrong] = engine.generate(["ab"], GREEDY)
        [ids] = engine.generate([[5, 6]], GREEDY)
    assert right.prompt_ids is not None
    assert wrong.prompt_ids == (BOS, *right.prompt_ids)
    assert ids.prompt_ids == (5, 6)


def test_a_new_salt_reads_nothing_that_is_cached(
    dense32: VllmServer, engine: OpenAIEngine, dense_folders: Folders
) -> None:
    before = _greedy(engine)
    with dense32.weights(dense_folders.updated, reset_cache=False):
        stale, fresh = _greedy(engine), _greedy(engine, "fresh")
        again = _greedy(engine, "fresh")
        dense32.reset_cache()
        assert _greedy(engine) == fresh == again
        assert stale != fresh
    assert _greedy(engine) == before


def test_scores_read_nothing_that_is_cached(
    dense32: VllmServer, engine: OpenAIEngine, dense_folders: Folders
) -> None:
    [before] = engine.score([LONG])
    with dense32.weights(dense_folders.updated, reset_cache=False):
        [stale] = engine.score([LONG])
        dense32.reset_cache()
        [fresh] = engine.score([LONG])
    assert stale[1:] == fresh[1:] != before[1:]


def test_an_adapter_is_selected_by_name(engine: OpenAIEngine) -> None:
    adapter = engine.using(adapter=ADAPTER)
    before = _greedy(engine)
    assert _greedy(adapter) != before
    assert _greedy(engine) == before
    [base], [adapted] = engine.score([LONG]), adapter.score([LONG])
    assert np.abs(np.subtract(base, adapted)[1:]).mean() > 0.1
    with pytest.raises(EngineError, match=r"`other` does not exist"):
        engine.using(adapter="other").generate([LONG])


def test_requests_are_sent_one_at_a_time_or_together(engine: OpenAIEngine) -> None:
    alone = engine.using(concurrency=1).generate(SHORT, GREEDY)
    assert alone == engine.using(concurrency=len(SHORT)).generate(SHORT, GREEDY)
    assert engine.using(concurrency=1).score(SHORT)[3][1:] == engine.score(SHORT)[3][1:]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_whether_log_probs_are_processed_is_measured(
    dense32: VllmServer, engine: OpenAIEngine, mode: str
) -> None:
    assert engine.info.processed is None
    with dense32.fault("sampler", mode=mode):
        assert is_processed(engine) is (mode == "processed_logprobs")
