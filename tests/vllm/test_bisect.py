"""`stagescope bisect` names planted faults of a real vLLM."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.command_line import invoke
from tests.support.engines.vllm_server import VllmServer
from tests.support.kept_steps import kept_step
from tests.vllm.conftest import Folders

from stagescope import cli
from stagescope_wire.batch import Batch
from stagescope_wire.engines import Sampling
from stagescope_workers.bisect.command import bisect
from stagescope_workers.bisect.transformers_model import TransformersModel

DRAWN = np.random.default_rng(0)


def _tokens(count: int) -> list[int]:
    return [int(token) for token in DRAWN.integers(2, 500, count)]


SHARED = _tokens(70)
"""A prefix of more than two blocks of the cache."""
PROMPTS = [[*SHARED, *_tokens(3)], [*SHARED, *_tokens(9)], _tokens(20), _tokens(45)]
PLAIN = Sampling(max_tokens=24, temperature=1.0, seed=1)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STAGESCOPE_URL", "STAGESCOPE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(cli.main.commands, "bisect", bisect)


@contextlib.contextmanager
def trainer(folder: Path, dtype: str) -> Iterator[TransformersModel]:
    model = TransformersModel(folder, dtype)
    yield model
    model.close()


def step(
    server: VllmServer, trained: Path, dtype: str, sampling: Sampling = PLAIN,
    temperature: float = 1.0,
) -> Batch:  # fmt: skip
    """A step that the server samples now; the trainer scores it with weights of its own."""
    engine = server.connect()
    made = engine.generate(PROMPTS, sampling)
    engine.close()
    responses = [list(each.token_ids or ()) for each in made]
    pairs = list(zip(PROMPTS, responses, strict=True))
    with trainer(trained, dtype) as model:
        scores = model.score_at([[*prompt, *ids] for prompt, ids in pairs], temperature)
    own = [row[len(prompt) :] for (prompt, _), row in zip(pairs, scores, strict=True)]
    return kept_step(PROMPTS, responses, [each.log_probs for each in made], own)


def answer(kept: Batch, server: VllmServer, model: Path, folder: Path, *words: str) -> Any:
    file = kept.save(folder / "step5.safetensors")
    found = invoke(
        "bisect", str(file), "--engine", server.url, "--model", str(model), "--json", *words
    )
    assert found.exit_code in (0, 1), found.output
    return json.loads(found.stdout)


def test_a_healthy_step(
    dense: VllmServer, dense32: VllmServer, dense_folders: Folders, tmp_path: Path
) -> None:
    base = dense_folders.base
    found = answer(step(dense32, base, "float32"), dense32, base, tmp_path)
    assert found["text"].startswith("Nothing is wrong with this step")
    assert found["mismatch"]["mean"] < 1e-5
    assert {each["status"] for each in found["arms"][:9]} == {"done"}
    for dtype in ("bfloat16", "float32"):
        found = answer(step(dense, base, dtype), dense, base, tmp_path)
        assert found["kind"] == "healthy", found["text"]
        assert found["mismatch"]["mean"] > 0.005


def test_wrong_weights(dense: VllmServer, dense_folders: Folders, tmp_path: Path) -> None:
    server, dtype = dense, "bfloat16"
    base, updated = dense_folders.base, dense_folders.updated
    # One layer was not synced: the trainer's model says so.
    with server.weights(dense_folders.one_old):
        found = answer(step(server, updated, dtype), server, updated, tmp_path)
    assert (found["kind"], found["swap"]) == ("weights", "transformers")
    # The sync did not arrive: the engine has the base, the checkpoint is the trainer's.
    kept = step(server, updated, dtype)
    words = ("--checkpoint", str(updated))
    found = answer(kept, server, base, tmp_path, *words)
    assert (found["kind"], found["swap"]) == ("weights", "checkpoint")
    assert answer(kept, server, base, tmp_path)["kind"] == "trainer_weights"


def test_a_stale_prefix_cache(
    dense: VllmServer, dense32: VllmServer, dense_folders: Folders, tmp_path: Path
) -> None:
    for server, dtype in ((dense, "bfloat16"), (dense32, "float32")):
        updated = dense_folders.updated
        engine = server.connect()
        engine.generate(PROMPTS, PLAIN)  # with the base's weights, into the cache
        engine.close()
        with server.weights(updated, reset_cache=False):
            found = answer(step(server, updated, dtype), server, updated, tmp_path)
        assert (found["kind"], found["swap"]) == ("prefix_cache", "uncached")
        server.reset_cache()


def test_processed_log_probs_and_a_temperature(
    dense: VllmServer, dense_folders: Folders, tmp_path: Path
) -> None:
    base = dense_folders.base
    for cuts, said in (
        ({"temperature": 0.8, "top_p": 0.9}, "temperature 0.8, top_p 0.9"),
        ({"temperature": 1.0, "top_k": 20}, "temperature 1, top_k 20"),
    ):
        sampling = Sampling(max_tokens=24, seed=3, **cuts)  # type: ignore[arg-type]
        with dense.fault("sampler", mode="processed_logprobs"):
            kept = step(dense, base, "bfloat16", sampling)
            live = answer(kept, dense, base, tmp_path)
        for found in (live, answer(kept, dense, base, tmp_path)):  # also after the repair
            assert found["kind"] == "processed"
            assert f"The rollout's log-probs are processed ({said})" in found["text"]
    with dense.fault("sampler", mode="processed_logprobs", temperature=0.7):
        found = answer(step(dense, base, "bfloat16"), dense, base, tmp_path)
    assert found["kind"] == "temperature"
    assert "The rollout's log-probs are at temperature 0.7" in found["text"]
    drawn = Sampling(max_tokens=24, seed=3, temperature=1.3)
    found = answer(step(dense, base, "bfloat16", drawn, 1.3), dense, base, tmp_path)
    assert "The trainer's log-probs are at temperature 1.3" in found["text"]


def test_bfloat16_rounding_of_the_head(
    dense32: VllmServer, dense_folders: Folders, tmp_path: Path
) -> None:
    base = dense_folders.base
    with dense32.fault("head", dtype="bfloat16"):
        kept = step(dense32, base, "float32")
        live = answer(kept, dense32, base, tmp_path)
    for found in (live, answer(kept, dense32, base, tmp_path)):
        assert found["kind"] == "head_rounding"
        assert found["text"].startswith("The rollout's head is rounded to bfloat16")


@pytest.mark.parametrize(
    ("fault", "said"),
    [({"first": 50}, "from token 50 of the sequence on"), ({"decode": True}, "of the response")],
)
def test_shifted_position_ids(
    fault: dict[str, Any], said: str, dense: VllmServer, dense_folders: Folders, tmp_path: Path
) -> None:
    base = dense_folders.base
    with dense.fault("positions", by=1, **fault):
        kept = step(dense, base, "bfloat16")
        live = answer(kept, dense, base, tmp_path)
    for found in (live, answer(kept, dense, base, tmp_path)):
        assert found["kind"] == "positions"
        assert f"The rollout's position ids {said} are shifted by +1" in found["text"]


def test_experts_that_were_reloaded_wrong(
    moe: VllmServer, moe_folders: Folders, tmp_path: Path
) -> None:
    """vLLM's own reload of a MoE on the CPU is silently wrong."""
    base = moe_folders.base
    assert answer(step(moe, base, "bfloat16"), moe, base, tmp_path)["kind"] == "healthy"
    moe.reload_weights(base)
    try:
        found = answer(step(moe, base, "bfloat16"), moe, base, tmp_path)
    finally:
        moe.load_weights(base)
    assert (found["kind"], found["swap"]) == ("weights", "transformers")
