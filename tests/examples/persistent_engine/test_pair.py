"""The pair of examples with a real engine: generated once, trained from with the engine gone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.support.api import service
from tests.support.engines.llama_cpp import llama_cpp
from tests.support.engines.tiny_llama import write_gguf, write_llama

from stagescope import attach
from stagescope_wire.batch import Batch

pytest.importorskip("transformers")
pytest.importorskip("xllamacpp")


def run(command: object, *words: object) -> Result:
    found = CliRunner().invoke(command, [str(word) for word in words])  # type: ignore[arg-type]
    assert found.exit_code == 0, found.output
    return found


def test_generate_once_and_train_without_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.persistent_engine.generate import generate
    from examples.persistent_engine.train import train

    model = write_llama(tmp_path / "model")
    gguf = write_gguf(model, tmp_path / "tiny.gguf")
    kept = tmp_path / "batch.safetensors"
    with service(tmp_path / "home") as live:
        assert live.tokens is not None
        monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
        monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)
        with llama_cpp(gguf) as url:
            live.operate.post("/engines", json={"url": url, "name": "llm"})
            reported = run(generate, "--model", model, "--engine", "llm", "--output", kept)
            assert "16 answers of llama.cpp" in reported.output
        [engine] = live.get("/engines", check=True)["rows"]
        assert engine["used_by"] == ["persistent-engine"]
        assert engine["state"] == "unreachable"  # gone before the training begins
        words = ("--model", model, "--batch", kept, "--steps", "3")
        losses, again = (
            [float(text) for text in re.findall(r"loss (\S+)", run(train, *words).output)]
            for _ in range(2)
        )
        assert losses == again
        assert len(losses) == 3
        assert losses[-1] < losses[0] - 0.05
        with attach() as session:
            mismatch = session.step(1, run="persistent-engine-train").metrics()
            assert mismatch.comparable == "comparable"
            # The engine's own (a float16 cache): were a prompt's padding or a shift wrong, units.
            assert 1e-6 < mismatch["logprob_abs_diff/mean"] < 2e-2
    batch = Batch.load(kept)
    assert batch.rows == 16
    assert set(batch.strings["group_ids"]) == {"0", "1", "2", "3"}
    assert (batch["response_mask"].sum(1) > 0).all()
