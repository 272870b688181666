"""Directories of dumps taken in as runs: by the command line, a real service, real files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("torch")
from tests.support.cluster import Service, eventually  # noqa: E402
from tests.support.command_line import invoke  # noqa: E402
from tests.support.dump_files import nexrl_directory  # noqa: E402

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home: Path = tmp_path_factory.mktemp("imports")
    running = Service.start(home, address, lease_seconds=20.0)
    yield running
    running.stop()


def taken_in(service: Service, *words: str, exit_code: int = 0) -> dict[str, Any]:
    env = {"STAGESCOPE_URL": service.info.url, "STAGESCOPE_TOKEN": service.token}
    result = invoke("import", *words, "--json", env=env)
    assert result.exit_code == exit_code, result.output
    report: dict[str, object] = json.loads(result.stdout)
    return report


def rows(service: Service, run: str, step: int) -> Sequence[dict[str, Any]]:
    with service.session() as session:
        return list(session.step(step, run=run).stages())


def test_a_nexrl_directory_becomes_a_run(service: Service, tmp_path: Path) -> None:
    directory = nexrl_directory(tmp_path / "dumps", steps=(0, 1), mode="weaver")
    report = taken_in(service, str(directory), "--run", "from-nexrl")
    assert (report["format"], report["problems"], report["refused"]) == ("nexrl", [], [])
    assert report["payloads"] > 0
    done = rows(service, "from-nexrl", 1)
    parts = {(row["stage"], row["role"], row["rank"], row["part"]) for row in done}
    assert {each[:3] for each in parts} >= {("actor_update", "actor", n) for n in (0, 1)}
    assert {part for stage, _, _, part in parts if stage == "actor_update"} == {
        "0.0.0.0", "0.0.0.1",
    }  # fmt: skip
    assert {row["status"] for row in done} == {"ok"}
    with service.session() as session:
        scalars = session.step(0, run="from-nexrl").scalars()
        assert {"loss", "pg_loss", "entropy_loss"} <= set(scalars["name"])
        attempt = session.attempts("from-nexrl")[0]
        assert attempt["attempt_key"] == report["attempt_key"]
        assert attempt["fingerprint"]["config"]["kind"] == "nexrl"
        eventually(lambda: session.attempts("from-nexrl")[0]["state"] == "ended")


def test_the_same_directory_again_counts_once(service: Service, tmp_path: Path) -> None:
    directory = nexrl_directory(tmp_path / "dumps")
    first = taken_in(service, str(directory), "--run", "twice")
    before = rows(service, "twice", 0)
    # The log-probs of the whole batch are no rank's: none is missing beside them.
    assert {row["status"] for row in before} == {"ok"}
    assert [row["role"] for row in before if row["stage"] == "actor_compute_log_prob"] == ["driver"]
    again = taken_in(service, str(directory), "--run", "twice")
    assert again == {**first, "nothing_new": True}
    assert not first["nothing_new"]
    assert rows(service, "twice", 0) == before
    with service.session() as session:
        assert len(session.attempts("twice")) == 1
        assert not session.findings("twice")


def test_a_damaged_file_is_named_and_the_others_are_there(service: Service, tmp_path: Path) -> None:
    directory = nexrl_directory(tmp_path / "dumps")
    damaged = next(directory.rglob("forward_data/*rank1*"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    report = taken_in(service, str(directory), "--run", "damaged", exit_code=1)
    assert [Path(each["path"]).name for each in report["problems"]] == [damaged.name]
    assert report["payloads"] > 0


def test_a_directory_of_nothing_is_refused(service: Service, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    env = {"STAGESCOPE_URL": service.info.url, "STAGESCOPE_TOKEN": service.token}
    result = invoke("import", str(tmp_path), "--run", "nothing", env=env)
    assert result.exit_code == 4
    assert "known format" in result.stderr


def test_it_needs_the_operate_token(service: Service, tmp_path: Path) -> None:
    directory = nexrl_directory(tmp_path / "dumps")
    read = service.info.token_file.read_text().strip()
    env = {"STAGESCOPE_URL": service.info.url, "STAGESCOPE_TOKEN": read}
    result = invoke("import", str(directory), "--run", "unasked", env=env)
    assert result.exit_code == 5, result.output
