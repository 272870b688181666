"""Bundles that are made by themselves when an attempt dies."""

from __future__ import annotations

import asyncio
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.api import Rank, Service, service
from tests.support.measure import payload
from tests.support.runs.shown import keep_tensors

from stagescope_service.report.bundle import keeper as keeping
from stagescope_service.report.bundle.keeper import BundleKeeper
from stagescope_service.store.queries.runs import DiedAttempt
from stagescope_wire.errors import NotReady

STAGE = "actor_compute_log_prob"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home", bundle_bytes=3 << 20) as running:
        keep_tensors(running)
        running.now = 100_000.0
        yield running


def noting(live: Service) -> Callable[..., None]:
    """How the API's actor tells the coordinator."""

    def note(attempt: DiedAttempt, step: int | None, message: str, path: Path | None) -> None:
        asyncio.run(
            live.app.state.deps.commands.note_bundle(
                run=attempt["run"], attempt_id=attempt["attempt_id"], step=step, message=message,
                path=None if path is None else str(path),
            )
        )  # fmt: skip

    return note


def keeper_of(live: Service, note: Any = None) -> BundleKeeper:
    return BundleKeeper(live.app.state.deps, note or noting(live), (live.tokens.operate,))


def die(live: Service, run: str = "r", *, steps: int = 2) -> Rank:
    """An attempt whose only process falls silent inside its last step."""
    assert live.now is not None
    rank = Rank(live, run=run, world_size=1, start=live.now - 2000.0)
    for step in range(1, steps + 1):
        rank.stage(STAGE, step, payload(seed=step))
    if steps:
        rank.begin("actor_update", steps)
    live.engine.fall_silent(rank)
    return rank


def bundled(live: Service, run: str = "r") -> list[dict[str, Any]]:
    rows = live.get("/findings", run=run)["rows"]
    return [row for row in rows if row["kind"] == "attempt_bundled"]


def test_an_attempt_that_dies_has_its_last_step_kept_once(live: Service) -> None:
    die(live)
    keeper = keeper_of(live)
    assert keeper.check() == 1
    (path,) = keeper.directory.iterdir()
    assert path.name == "r-1-step2.tar.gz"
    (finding,) = bundled(live)
    assert (finding["step"], finding["severity"]) == (2, "info")
    assert "died in step 2 (its processes fell silent)" in finding["message"]
    assert str(path) in finding["message"]
    assert f"stagescope attach {path}" in finding["advice"]
    with tarfile.open(path) as tar:
        names = tar.getnames()
    assert "stagescope-bundle/report-step.html" in names
    assert any("payloads" in name for name in names)
    # Once an attempt, also by another keeper, after the file is gone.
    path.unlink()
    assert keeper.check() == 0
    assert keeper_of(live).check() == 0
    assert not list(keeper.directory.iterdir())


def test_only_attempts_that_died_lately_have_one(live: Service) -> None:
    rank = Rank(live, run="done", world_size=1, start=98_000.0)
    rank.stage(STAGE, 1, payload())
    rank.say("finish")
    Rank(live, run="running", world_size=1, start=98_000.0).begin(STAGE, 1)
    die(live, "old")
    keeper = keeper_of(live)
    live.now = 98_000.0 + keeping.SETTLE_SECONDS / 2  # its payloads may still be read
    assert keeper.check() == 0
    live.now = 100_000.0 + 2 * keeping.NEWEST_SECONDS
    assert keeper.check() == 0
    assert not keeper.directory.exists()


def test_an_attempt_without_a_step_is_said(live: Service) -> None:
    die(live, steps=0)
    assert keeper_of(live).check() == 1
    (finding,) = bundled(live)
    assert "before its first step" in finding["message"]
    assert finding["severity"] == "warning"


def test_a_full_disk_is_said_and_is_not_tried_again(
    live: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    die(live)
    monkeypatch.setattr("stagescope_service.report.bundle.making.MIN_ROOM", 1 << 60)
    keeper = keeper_of(live)
    assert keeper.check() == 1
    (finding,) = bundled(live)
    assert "could not be bundled" in finding["message"]
    assert "no room for a bundle" in finding["message"]
    assert keeper.check() == 0


def test_the_oldest_go_first(live: Service) -> None:
    keeper = keeper_of(live)
    for run in ("a", "b", "c"):
        die(live, run)
        assert keeper.check() == 1
    names = {path.name for path in keeper.directory.iterdir()}
    sizes = [path.stat().st_size for path in keeper.directory.iterdir()]
    assert "c-1-step2.tar.gz" in names
    assert "a-1-step2.tar.gz" not in names
    assert sum(sizes) <= live.settings.bundle_bytes


def test_a_coordinator_that_is_away_is_told_later(live: Service) -> None:
    die(live)
    told: list[str] = []

    def note(attempt: DiedAttempt, step: int | None, message: str, path: Path | None) -> None:
        told.append(message)
        if len(told) == 1:
            raise NotReady("the coordinator is being restarted")
        noting(live)(attempt, step, message, path)

    keeper = keeper_of(live, note)
    with pytest.raises(NotReady):
        keeper.check()
    assert bundled(live) == []
    assert keeper.check() == 1
    assert len(bundled(live)) == 1


def test_nothing_that_fails_ends_it(live: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    stopping, checked = threading.Event(), []

    def check(keeper: BundleKeeper) -> int:
        checked.append(keeper)
        if len(checked) == 2:
            stopping.set()
        raise RuntimeError("something unforeseen")

    monkeypatch.setattr(BundleKeeper, "check", check)
    monkeypatch.setattr(keeping, "CHECK_SECONDS", 0.01)
    keeper_of(live).run(stopping)
    assert len(checked) == 2


def test_without_room_there_are_none(tmp_path: Path) -> None:
    with service(tmp_path / "home", bundle_bytes=0) as running:
        keeper_of(running).run(threading.Event())  # returns at once
