"""`stagescope consistency` with real engines: llama.cpp's server, CTranslate2, transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from tests.support.answering import serving
from tests.support.api import Service
from tests.support.command_line import invoke
from tests.support.engines.servers import EngineServer

from stagescope import attach, cli
from stagescope_wire.engines import Sampling, connect
from stagescope_wire.errors import EngineError
from stagescope_workers.consistency.command import consistency
from stagescope_workers.consistency.transformers_engine import TransformersEngine


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    # The entry point of an installed package, also where only its sources are.
    monkeypatch.setitem(cli.main.commands, "consistency", consistency)


@pytest.fixture
def _no_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("STAGESCOPE_URL", "STAGESCOPE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("STAGESCOPE_HOME", str(tmp_path / "home"))


def run(*words: str | Path) -> Result:
    return invoke("consistency", *map(str, words))


def report(*words: str | Path) -> Any:
    found = run(*words, "--json")
    assert found.exit_code in (0, 1), found.output
    return json.loads(found.stdout)


def test_llama_cpp_is_detected_and_generates(llama_url: str) -> None:
    engine = connect(llama_url)
    assert (engine.info.kind, engine.info.scores) == ("llama.cpp", False)
    made = engine.generate([[0, 5, 9], "the"], Sampling(max_tokens=5, temperature=1.0, seed=2))
    for each in made:
        assert each.problem == ""
        assert len(each.token_ids or ()) == len(each.log_probs) == 5
        assert all(value < 0 for value in each.log_probs)
    assert made[0].prompt_tokens == 3
    with pytest.raises(EngineError, match="no log-probs of given tokens"):
        engine.score([[0, 5]])
    engine.close()


def test_llama_cpp_against_transformers_is_recorded(
    llama_url: str, model: Path, live: Service
) -> None:
    words = ("--model", model, "--engine", llama_url, "--run", "llama", "--max-tokens", "32")
    found = report(*words, "--temperature", "2")
    assert found["aligned"], found["checks"]
    metrics = found["metrics"]
    # Its cache of keys and values is float16: a real mismatch, small against the log-probs.
    assert 1e-5 < metrics["logprob_abs_diff/mean"] < 2e-2
    assert metrics["training/rollout_actor_probs_pearson_corr"] > 0.99
    assert "recorded as step 1 of run llama" in found["recorded"]
    with attach() as session:
        step = session.step("measured", run="llama")
        published = step.metrics()
        for name in set(metrics) & set(published):
            assert metrics[name] == pytest.approx(published[name], rel=1e-5), name
        assert len(set(metrics) & set(published)) == 8
        assert (published.stage, published.complete) == ("rollout_generate", "complete")
        assert published.comparable == "comparable"
        worst = step.tokens(limit=1)[0]
        assert worst["abs_diff"] == pytest.approx(found["worst"][0]["abs_diff"], rel=1e-5)
        assert (worst["role"], worst["token_id"]) == ("rollout", found["worst"][0]["token_id"])
    rollout, old = found["streams"]["rollout"], found["streams"]["old"]
    assert (rollout["engine"], rollout["temperature"], rollout["processed"]) == (
        "llama.cpp", 2.0, False,
    )  # fmt: skip
    assert (old["engine"], old["temperature"]) == ("transformers", 1.0)


@pytest.mark.usefixtures("_no_service")
def test_a_bos_of_the_engine_s_own_is_found(llama_url: str, model: Path) -> None:
    """llama.cpp adds a BOS to a text whose template has one already."""
    words = ("--model", model, "--engine", llama_url, "--chat", "--limit", "3", "--max-tokens", "8")
    assert report(*words)["aligned"]
    as_text = run(*words, "--as-text")
    assert as_text.exit_code == 1
    assert "3 of 3 prompts differ" in as_text.stdout
    assert "a BOS of its own" in as_text.stdout.replace("\n  ", " ")
    assert "not recorded: no service is known here" in as_text.stdout.replace("\n", " ")


@pytest.mark.usefixtures("_no_service")
def test_what_is_printed_fits_80_columns(
    converted: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = run("--model", model, "--engine", f"ctranslate2:{converted}", "--limit", "2")
    assert found.exit_code == 0, found.output
    # A path is never broken: one that is longer stands on a line of its own.
    assert max(len(line) for line in found.stdout.splitlines() if " " in line.strip()) <= 80
    for word in ("ok  prompts", "ok  shift", "logprob_abs_diff/mean", "worst tokens", "q is"):
        assert word in found.stdout


@pytest.mark.usefixtures("_no_service")
def test_a_dtype_of_its_own_is_a_mismatch_and_the_same_is_none(model: Path) -> None:
    words = ("--model", model, "--engine", "transformers:bfloat16", "--limit", "4")
    coarse = report(*words)["metrics"]["logprob_abs_diff/mean"]
    same = report(*words, "--against", "transformers:bfloat16")["metrics"]["logprob_abs_diff/mean"]
    assert coarse > 1e-3
    assert same < coarse / 2


@pytest.mark.usefixtures("_no_service")
def test_a_data_set_with_answers(converted: Path, model: Path, tmp_path: Path) -> None:
    engine = TransformersEngine(model)
    prompts = ["2 + 2 =", "the", "abc"]
    right = [each.text for each in engine.generate(prompts, Sampling(max_tokens=6))]
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": prompts[0], "answer": right[0]}, {"prompt": prompts[1], "answer": "no way"},
            {"prompt": prompts[2], "answer": right[2]}]  # fmt: skip
    data.write_text("\n".join(json.dumps(row) for row in rows))
    found = report(
        "--model", model, "--engine", f"ctranslate2:{converted}", "--dataset", data,
        "--match", "exact", "--max-tokens", "6",
    )  # fmt: skip
    answers = found["answers"]
    assert found["sampling"]["temperature"] == 0
    assert (answers["answers"], answers["same"], answers["token_share"]) == (3, 3, 1.0)
    assert (answers["marked"], answers["engine_right"], answers["other_right"]) == (3, 2, 2)
    assert [row["other"] for row in answers["rows"]] == right


@pytest.mark.usefixtures("_no_service")
def test_a_registered_engine_and_one_that_is_not_there(
    model: Path, llama_url: str, live: Service
) -> None:
    live.operate.post("/engines", json={"url": llama_url, "name": "llm"})
    found = report("--model", model, "--engine", "llm", "--limit", "1", "--no-record")
    assert found["engine"]["kind"] == "llama.cpp"
    assert found["recorded"] == "not recorded"
    assert run("--model", model, "--engine", "nobody").exit_code == 4
    assert run("--model", model, "--engine", "127.0.0.1:9").exit_code == 1


@pytest.mark.usefixtures("_no_service")
@pytest.mark.parametrize("engine", ["", ":", "ctranslate2:", "ftp:", "a:b:c"])
def test_what_names_no_engine(model: Path, engine: str) -> None:
    found = run("--model", model, "--engine", engine)
    assert found.exit_code == 2
    assert "ctranslate2:DIR" in found.stderr


@pytest.mark.usefixtures("_no_service")
def test_answers_without_log_probs_are_left_out_and_counted(model: Path) -> None:
    server = EngineServer("openai")
    with serving(server.app) as url:
        server.broken = {
            "choices": [{"text": "x", "finish_reason": "stop"}],
            "usage": {"completion_tokens": 1},
        }
        found = run("--model", model, "--engine", url, "--limit", "2")
    assert found.exit_code == 1
    assert "left out 2 answers (0: the server returned no log-probs" in found.stdout
    assert "not recorded: no token has two log-probs" in found.stdout
