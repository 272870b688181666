"""What the service may ask a process that hangs, and what its watchdog says where it cannot."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.coordinators import FakeCoordinator, wait_for

from stagescope_wire.errors import Forbidden, InvalidInput
from stagescope_wire.schema import STACKS
from stagescope_wire.stacks import (
    MAX_CHARACTERS,
    MAX_FRAMES,
    parse_watchdog,
    read_watchdog,
    watchdog_directory,
    watchdog_header,
)
from stagescope_workers.probe import watchdog
from stagescope_workers.probe.options import checked_options
from stagescope_workers.probe.probe import Probe

MakeProbe = Callable[..., Probe]


@pytest.fixture(autouse=True)
def _own_watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test a watchdog of its own, in a directory of its own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(watchdog, "_process_watchdog", None)


def request(name: str) -> dict[str, object]:
    return {"what": STACKS, "request_id": name}


def answers(coordinator: FakeCoordinator) -> list[dict[str, Any]]:
    return [dict(event.fields) for event in coordinator.of_kind(STACKS)]


def stand_still(seconds: float) -> None:
    """Hold the interpreter lock: a PyDLL's functions do not let it go."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_blocked_training_thread_is_shown_with_its_stage(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    release = threading.Event()

    def block_here() -> None:
        with probe.stage("actor_update", step=7, minibatch=2):
            release.wait(60)

    training = threading.Thread(target=block_here, name="trainer")
    training.start()
    try:
        wait_for(lambda: coordinator.of_kind("begin"))
        coordinator.ask(request("r1"))
        wait_for(lambda: answers(coordinator))
    finally:
        release.set()
        training.join()
    [reported] = answers(coordinator)
    assert (reported["request_id"], reported["source"]) == ("r1", "probe")
    assert (reported["step"], reported["stage"], reported["minibatch"]) == (7, "actor_update", 2)
    first = reported["threads"][0]
    assert first["is_training"]
    assert first["name"] == "trainer"
    assert "block_here" in first["stack"]
    assert "release.wait(60)" in first["stack"]
    assert first["stack"].index("block_here") < first["stack"].index("in wait")
    others = {thread["name"]: thread["is_training"] for thread in reported["threads"][1:]}
    assert others["stagescope"] is False
    assert others["MainThread"] is False


def test_a_request_is_answered_once_and_an_unknown_one_not_at_all(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe()
    with probe.stage("s", step=1):
        pass
    coordinator.ask(request("r1"), {"what": "dance", "request_id": "r2"}, request("r3"))
    wait_for(lambda: len(answers(coordinator)) == 2)
    polls = len(coordinator.revisions)
    wait_for(lambda: len(coordinator.revisions) > polls + 3)  # each carried the requests again
    assert [reported["request_id"] for reported in answers(coordinator)] == ["r1", "r3"]
    # Between two stages the thread of the last one is the training thread.
    assert answers(coordinator)[0]["step"] == 1
    assert answers(coordinator)[0].get("stage") is None
    training = [t["name"] for t in answers(coordinator)[0]["threads"] if t["is_training"]]
    assert training == ["MainThread"]


def test_stacks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(left: int) -> dict[str, Any]:  # two by turns: repeated frames are written as one
        return deeper(left - 1) if left else watchdog.collect_stacks("r", training=[], work={})

    def deeper(left: int) -> dict[str, object]:
        return deep(left - 1) if left else watchdog.collect_stacks("r", training=[], work={})

    reported = deep(400)
    mine = next(t for t in reported["threads"] if t["ident"] == threading.get_ident())
    assert mine["stack"].count("in deep") == MAX_FRAMES - 1
    assert mine["stack"].splitlines()[-2].endswith("in collect_stacks")  # the innermost are kept
    monkeypatch.setattr(watchdog, "MAX_CHARACTERS", 100)
    reported = deep(5)
    assert sum(len(thread["stack"]) for thread in reported["threads"]) <= 100
    assert reported["truncated"]


def test_stages_that_never_end_do_not_pile_up(
    make_probe: MakeProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagescope_workers.probe.watchdog._MAX_OPEN", 4)
    probe = make_probe()
    for step in range(20):
        probe.begin("s", step=step)
    probe.stage_tracker.current_work()
    assert len(probe.stage_tracker._open_stages) == 4
    assert probe.stage_tracker.current_work()[1]["step"] == 19


# --- the watchdog -----------------------------------------------------------------------------


def test_a_process_that_was_blocked_reports_its_stacks_once_it_resumes(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe(watchdog=0.3)
    with probe.stage("actor_update", step=3):
        wait_for(lambda: coordinator.of_kind("begin"))
        path = coordinator.of_kind("hello")[0].fields["watchdog"]
        # Its first line says the stage once it was set inside it.
        wait_for(lambda: "actor_update" in Path(path).read_text())
        stand_still(1.0)
        found = read_watchdog(path)
        wait_for(lambda: answers(coordinator))
    reported = answers(coordinator)[0]
    assert found is None or found["request_id"] == reported["request_id"]
    assert reported["source"] == "watchdog"
    assert (reported["step"], reported["stage"]) == (3, "actor_update")
    [training] = [thread for thread in reported["threads"] if thread["is_training"]]
    assert training["name"] == "MainThread"
    assert training["stack"].splitlines()[-1].endswith("in stand_still")
    probe.close(5.0)
    assert not Path(path).exists()


def test_a_process_that_runs_does_not_set_it_off(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    probe = make_probe(watchdog=1.5)
    path = Path(coordinator.fields("hello")[0]["watchdog"])
    until = time.monotonic() + 3.0
    while time.monotonic() < until:  # longer than it would take to go off
        sum(range(1000))
    assert read_watchdog(path) is None
    assert not answers(coordinator)
    probe.close(5.0)
    assert not path.exists()


def test_it_can_be_switched_off(
    make_probe: MakeProbe,
    coordinator: FakeCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("STAGESCOPE_WATCHDOG", "0")
    make_probe()
    assert coordinator.fields("hello")[0].get("watchdog") is None
    assert not watchdog_directory(tmp_path).exists()
    monkeypatch.setenv("STAGESCOPE_WATCHDOG", "12.5")
    assert checked_options({"run": "r"}).watchdog == 12.5
    with pytest.raises(InvalidInput, match="watchdog is 'soon'"):
        checked_options({"run": "r", "watchdog": "soon"})


def test_a_directory_of_somebody_else_is_not_used(
    make_probe: MakeProbe, coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    watchdog_directory(tmp_path).symlink_to(elsewhere)
    probe = make_probe(watchdog=0.3)
    assert coordinator.fields("hello")[0].get("watchdog") is None
    assert not [*elsewhere.iterdir()]
    with probe.stage("s", step=1):
        pass
    wait_for(lambda: coordinator.of_kind("end"))


def test_two_probes_of_a_process_share_it_and_the_last_removes_it(
    make_probe: MakeProbe, coordinator: FakeCoordinator
) -> None:
    first, second = make_probe(role="actor"), make_probe(role="ref")
    wait_for(lambda: len(coordinator.of_kind("hello")) == 2)
    paths = {event.fields["watchdog"] for event in coordinator.of_kind("hello")}
    assert len(paths) == 1
    path = Path(paths.pop())
    first.close(5.0)
    assert path.exists()
    second.close(5.0)
    assert not path.exists()


HELD_LATER = """
dog.feed(lambda: ([threading.get_ident()], {"step": 4, "stage": "s"}))
print(dog.path, flush=True)
hold()
"""
HELD_WHILE_FED = """
dog.feed(lambda: ([threading.get_ident()], {"step": 4, "stage": "s"}))
print(dog.path, flush=True)
time.sleep(dog.interval)
dog.feed(hold)
"""


@pytest.mark.parametrize("held", [HELD_LATER, HELD_WHILE_FED], ids=["later", "while it is fed"])
def test_it_writes_where_the_process_never_resumes(tmp_path: Path, held: str) -> None:
    code = f"""
import ctypes, threading, time
from stagescope_workers.probe.watchdog import Watchdog
def hold():
    ctypes.PyDLL(None).pause()
dog = Watchdog(0.2)
dog.open()
{held}
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        # The file is written line by line: its stack may not be complete yet.
        wait_for(lambda: _stack_of_first(path).endswith("in hold"))
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    reported = read_watchdog(path)
    assert reported is not None
    assert reported["step"] == 4


def _stack_of_first(path: str) -> str:
    reported = read_watchdog(path)
    return "" if reported is None else str(reported["threads"][0]["stack"]).rstrip()


# --- its file ---------------------------------------------------------------------------------

NAME = "1-" + "0" * 32 + ".txt"


def test_only_a_watchdog_s_file_is_read(tmp_path: Path) -> None:
    directory = watchdog_directory(tmp_path)
    directory.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("x\nTimeout (0:00:30)!\nThread 0x1 (most recent call first):\n")
    for path in (secret, directory / "secret.txt", f"{directory}/../{NAME}", f"relative/{NAME}"):
        with pytest.raises(Forbidden, match="is not a watchdog's file"):
            read_watchdog(path)
    assert read_watchdog(directory / NAME) is None
    (directory / NAME).symlink_to(secret)
    with pytest.raises(OSError, match="symbolic"):
        read_watchdog(directory / NAME)
    (directory / NAME).unlink()
    os.mkfifo(directory / NAME)
    with pytest.raises(Forbidden, match="regular"):
        read_watchdog(directory / NAME)


def test_a_file_of_any_content_is_read_in_bounds(tmp_path: Path) -> None:
    directory = watchdog_directory(tmp_path)
    directory.mkdir()
    frame = b'  File "x.py", line 1 in f\n'
    (directory / NAME).write_bytes(b"no json \xff\nTimeout (1)!\nThread 0xff:\n" + frame * 20_000)
    reported = read_watchdog(directory / NAME)
    assert reported is not None
    assert reported["truncated"]
    assert len(reported["threads"][0]["stack"]) <= MAX_CHARACTERS
    assert reported["threads"][0]["ident"] == 255
    head = watchdog_header(armed=1.5, threads={255: "t"}, training=[255], work={"step": 1})
    for no_thread in ("", "Timeout (1)!\n"):
        assert parse_watchdog(head + no_thread) is None
    dumped = head + "Timeout (1)!\nThread 0xff (most recent call first):\n  inner\n  outer\n"
    reported = parse_watchdog(dumped)
    assert reported is not None
    assert reported["request_id"] == "watchdog-1500"
    assert reported["threads"] == [
        {"name": "t", "ident": 255, "is_training": True, "stack": "  outer\n  inner"}
    ]
