"""`stagescope consistency` with a real vLLM: what it measures, and what it says of each fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.command_line import invoke
from tests.support.engines.vllm_server import VllmServer

from stagescope import cli
from stagescope_workers.consistency.command import consistency

MEAN = "logprob_abs_diff/mean"


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    # The entry point of an installed package, also where only its sources are.
    monkeypatch.setitem(cli.main.commands, "consistency", consistency)


def compare(server: VllmServer, *words: str, against: str = "transformers:bfloat16") -> Any:
    """Compare the server with transformers; return the report, whose `aligned` is the exit code."""
    given = ("--model", str(server.model), "--engine", server.url, "--against", against)
    found = invoke("consistency", *given, "--no-record", "--json", *words)
    assert found.exit_code in (0, 1), found.output
    report = json.loads(found.stdout)
    assert report["aligned"] is (found.exit_code == 0)
    return report


def failed(report: Any) -> dict[str, str]:
    """Return name -> text of the checks that failed."""
    return {each["name"]: each["text"] for each in report["checks"] if each["ok"] is False}


@pytest.mark.parametrize(
    ("name", "against", "low", "high"),
    [
        ("dense32", "float32", 0, 1e-4),
        ("dense", "bfloat16", 0.005, 0.05),
        ("moe", "bfloat16", 0.01, 0.1),  # some tokens go to other experts
    ],
)
def test_a_right_engine_is_aligned(
    name: str, against: str, low: float, high: float, request: pytest.FixtureRequest
) -> None:
    server: VllmServer = request.getfixturevalue(name)
    report = compare(server, against=f"transformers:{against}")
    assert not failed(report)
    assert low <= report["metrics"][MEAN] < high
    assert report["metrics"]["counts/tokens"] > 300


def test_an_moe_that_was_reloaded_has_other_weights(moe: VllmServer) -> None:
    moe.reload_weights(moe.model)
    try:
        report = compare(moe)
    finally:
        moe.load_weights(moe.model)
    assert "other weights, or another model?" in failed(report)["shift"]
    assert report["metrics"][MEAN] > 1


def test_a_bos_that_the_server_adds_is_named(dense32: VllmServer) -> None:
    assert not failed(compare(dense32, "--as-text"))
    with dense32.adding_bos():
        report = compare(dense32, "--as-text")
    assert "it puts <s> in front" in failed(report)["prompts"]
    assert report["metrics"][MEAN] > 0.1


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_processed_log_probs_are_compared_at_the_temperature(
    dense32: VllmServer, mode: str
) -> None:
    with dense32.fault("sampler", mode=mode):
        report = compare(dense32, "--temperature", "0.7", against="transformers:float32")
    is_processed = mode == "processed_logprobs"
    assert report["streams"]["rollout"]["processed"] is is_processed
    assert report["streams"]["old"]["temperature"] == (0.7 if is_processed else 1.0)
    assert report["metrics"][MEAN] < 1e-4


def test_another_temperature_than_requested_moves_log_probs(dense32: VllmServer) -> None:
    with dense32.fault("sampler", mode="processed_logprobs", temperature=0.5):
        report = compare(dense32, "--temperature", "0.7", against="transformers:float32")
    assert report["metrics"][MEAN] > 0.1
