"""What changed between two attempts, over HTTP, by the session and on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke

from stagescope_wire.errors import InvalidInput, NotFound


def start(running: Service, run: str, key: str, torch: str, **config: object) -> None:
    attempt_fingerprint = {
        "packages": {"torch": torch},
        "config": config,
        "git": {"commit": "a" * 40},
    }
    Rank(
        running, run=run, key=key, fingerprint=attempt_fingerprint, world_size=1,
        layout={"host": f"host-{key}", "device_kind": "npu"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as made:
        start(made, "sick", "one", "2.12.0", lr=1e-6, note="x" * 200)
        start(made, "sick", "two", "2.13.0", lr=1.0000001e-6, note="y" * 200)
        Rank(made, run="bare", key="k")
        yield made


def test_two_attempts_of_a_run(running: Service) -> None:
    found = running.get("/diff", a="sick@1", b="sick@2")
    assert (found["a"]["attempt"], found["b"]["attempt"]) == (1, 2)
    assert [(row["area"], row["name"], row["a"], row["b"]) for row in found["rows"]][:3] == [
        ("config", "lr", 1e-6, 1.0000001e-6),
        ("config", "note", "x" * 200, "y" * 200),
        ("packages", "torch", "2.12.0", "2.13.0"),
    ]
    assert found["counts"] == {"numbers": 3, "place": 1}
    assert found["unknown"] == []


def test_without_an_attempt_the_newest_answers(running: Service) -> None:
    found = running.get("/diff", a="sick", b="bare")
    assert (found["a"]["attempt"], found["unknown"]) == (2, ["b"])


def test_the_session_follows_pages(running: Service) -> None:
    with running.session() as session:
        changes = session.diff("sick@1", "sick@2")
        assert changes.where(weight="numbers")["name"] == ("lr", "note", "torch")
        assert changes.heading == "sick@1 (a) against sick@2 (b): 4 things differ"
        with pytest.raises(NotFound, match="attempt"):
            session.diff("sick@7", "sick")
        with pytest.raises(InvalidInput, match="RUN"):
            session.diff("sick@1:5", "sick")


def test_on_the_command_line_values_that_differ_never_read_the_same(
    running: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
    monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.read)
    result = invoke("diff", "sick@1", "sick@2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "  config lr: 1e-06 -> 1.0000001e-06" in lines
    assert "  packages torch: 2.12.0 -> 2.13.0" in lines
    assert lines.index("may change numbers:") < lines.index("another place:")
    assert max(map(len, lines)) <= 80
    same = invoke("diff", "sick@1", "sick@1")
    assert "nothing that is known differs" in same.stdout
    assert "not compared: " in same.stdout
    assert "no side has hashes of its script" in " ".join(same.stdout.split())
    differences = json.loads(invoke("diff", "sick@1", "sick@2", "--json").stdout)
    assert differences["rows"][0]["name"] == "lr"
