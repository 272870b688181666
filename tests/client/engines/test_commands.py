"""`stagescope engines` on a real service and engines of vLLM's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.answering import serving
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.engines.servers import EngineServer

import stagescope
from stagescope_wire.engines import Sampling


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as started:
        yield started


@pytest.fixture
def live(running: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """The service, found by the environment; its registry is empty."""
    assert running.tokens is not None
    monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.operate)
    for row in running.get("/engines")["rows"]:
        running.operate.delete(f"/engines/{row['name']}")
    return running


def test_add_list_use_and_remove(live: Service) -> None:
    with serving(EngineServer("vllm").app) as url:
        added = invoke("engines", "add", url, "--name", "llm", "--run", "countdown")
        assert added.exit_code == 0, added.output
        listed = invoke("engines", "list", "--check", "--json")
        [row] = json.loads(listed.stdout)["rows"]
        assert (row["name"], row["state"], row["kind"]) == ("llm", "up", "vllm")
        assert (row["model"], row["used_by"]) == ("m", ["countdown"])
        shown = invoke("engines").stdout
        assert "llm" in shown
        assert "up" in shown
        rollout = stagescope.engine("llm")
        assert rollout.generate([[1, 2, 3]], Sampling(max_tokens=2))[0].token_ids is not None
        rollout.close()
    assert invoke("engines", "remove", "llm").exit_code == 0
    assert invoke("engines", "remove", "llm").exit_code == 4


def test_those_of_a_launcher_s_log_and_of_the_environment(
    live: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(EngineServer("sglang").app) as url:
        address = url.removeprefix("http://")
        log = tmp_path / "llm_server.log"
        log.write_text(f"launched at: AREAL_LLM_SERVER_ADDRS={address},127.0.0.1:9\n")
        added = invoke("engines", "add", "--from-log", str(log))
        assert added.exit_code == 0, added.output
        assert "127.0.0.1:9" in added.stderr  # it does not answer, and is kept all the same
        rows = {row["url"]: row for row in live.get("/engines")["rows"]}
        assert rows[url]["kind"] == "sglang"
        assert rows[url]["settings"]["weight_version"] == "3"
        assert rows["http://127.0.0.1:9"]["kind"] is None
        monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
        assert invoke("engines", "add").exit_code == 4
        monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", address)
        assert json.loads(invoke("engines", "add", "--json").stdout)["url"] == url


@pytest.mark.parametrize(
    "args",
    [
        ("add", "ftp://h"), ("add", "http://u:p@h"), ("remove",), ("list", "x"),
        ("add", "http://h:1", "--from-log", __file__),
    ],
)  # fmt: skip
def test_what_is_not_understood(live: Service, args: tuple[str, ...]) -> None:
    assert invoke("engines", *args).exit_code == 2
    assert live.get("/engines")["rows"] == []


def test_the_read_token_may_not_register(live: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    assert live.tokens is not None
    monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.read)
    assert invoke("engines", "add", "127.0.0.1:9").exit_code == 5
    assert invoke("engines").exit_code == 0
