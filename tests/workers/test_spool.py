"""Processes that write into a spool instead of sending, and the service that takes it in."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.runs.shown import keep_tensors
from tests.support.stores import eventually

import stagescope
from stagescope_wire import framing, spool
from stagescope_wire.errors import InvalidInput, Unreachable
from stagescope_wire.schema import Sender
from stagescope_workers.transport.spool_link import SpoolLink

TRAINING = """
import sys, time
import numpy as np
from stagescope_workers import finish, init

rank, steps, run = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
probe = init(run=run, role="actor", rank=rank, world_size=2, attempt_key="a")
for step in range(1, steps + 1):
    rng = np.random.default_rng(100 * step + rank)
    q = -rng.random((4, 16), np.float32)
    p = q + rng.normal(0, 0.01, q.shape).astype(np.float32)
    with probe.stage("actor_compute_log_prob", step=step) as stage:
        stage.record(rollout_log_probs=q, old_log_probs=p, response_mask=np.ones_like(q))
    with probe.stage("actor_update", step=step) as stage:
        stage.log(loss=float(step))
    print(step, flush=True)
    if "wait" in sys.argv:
        sys.stdin.readline()
print("finished", finish(timeout=30), flush=True)
"""


def start(rank: int, steps: int, url: str, *words: str, run: str = "r", **env: str) -> Any:
    known = {k: v for k, v in os.environ.items() if not k.startswith("STAGESCOPE_")}
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(rank), str(steps), run, *words],
        env={**known, "STAGESCOPE_URL": url, **env}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def end(process: Any) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


def train(url: str, steps: int = 4, run: str = "r", **env: str) -> None:
    ranks = [start(rank, steps, url, run=run, **env) for rank in (0, 1)]
    for each in ranks:
        out, _ = each.communicate(timeout=120)
        assert "finished True" in out, out


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        keep_tensors(running)
        yield running


def environment(live: Service) -> dict[str, str]:
    assert live.tokens is not None
    return {"STAGESCOPE_URL": live.server.url, "STAGESCOPE_TOKEN": live.tokens.operate}


def test_a_spool_gives_the_numbers_that_sending_gives(live: Service, tmp_path: Path) -> None:
    directory = tmp_path / "a spool"
    train(f"file://{str(directory).replace(' ', '%20')}", run="spooled")
    train(run="sent", url=live.server.url, STAGESCOPE_TOKEN=environment(live)["STAGESCOPE_TOKEN"])
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.rglob("*"))
    done = invoke("import", str(directory), "--json", env=environment(live))
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["runs"], report["processes"], report["payloads"]) == (["spooled"], 2, 8)
    assert report["refused"] == report["unread"] == []
    for step in range(1, 5):
        spooled, sent = (live.get(f"/steps/{step}/metrics", run=run) for run in ("spooled", "sent"))
        assert spooled["metrics"] == sent["metrics"]
        assert spooled["complete"] == sent["complete"] == "complete"
    rows = live.get("/runs/spooled/attempts")["rows"]
    assert [row["end_reason"] for row in rows] == ["finished"]
    # Once more: nothing counts twice, and with --delete nothing stays.
    before = live.get("/steps/4/metrics", run="spooled")
    done = invoke("import", str(directory), "--delete", env=environment(live))
    assert done.exit_code == 0, done.output
    assert live.get("/steps/4/metrics", run="spooled")["coverage"] == before["coverage"]
    assert not [*directory.rglob("*.events")]
    with stagescope.attach(live.server.url, token=environment(live)["STAGESCOPE_TOKEN"]) as session:
        assert len(session.attempts("spooled")) == 1


def is_measured(live: Service, step: int) -> bool:
    found = live.read.get(f"/steps/{step}/metrics", params={"run": "r"})
    return found.status_code == 200 and found.json()["complete"] == "complete"


@contextlib.contextmanager
def following(directory: Path, live: Service) -> Iterator[Any]:
    program = "from stagescope.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "import", str(directory), "--follow"],
        env={**os.environ, **environment(live)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        end(process)


def test_a_spool_is_followed_while_processes_write_and_one_is_killed(
    live: Service, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    directory = tmp_path / "spool"
    ranks = [start(rank, 9, f"file://{directory}", "wait") for rank in (0, 1)]
    for each in ranks:
        request.addfinalizer(functools.partial(end, each))
    eventually(lambda: directory.is_dir() and len(spool.folders(directory)) == 2)

    def goes_on(step: int) -> None:
        for each in ranks:
            assert each.stdout.readline() == f"{step}\n"

    with following(directory, live) as process:
        for step in (1, 2, 3):
            goes_on(step)
            for each in ranks:
                each.stdin.write("\n")
                each.stdin.flush()
        goes_on(4)
        eventually(lambda: is_measured(live, 3))
        ranks[1].kill()
        ranks[0].stdin.write("\n" * 9)
        ranks[0].stdin.flush()
        out, _ = ranks[0].communicate(timeout=120)
        assert "finished True" in out
        eventually(lambda: any(row["step"] == 9 for row in live.get("/steps", run="r")["rows"]))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        said = process.stdout.read()
        assert "importing run r" in said
        assert "of 2 processes, runs: r" in said


def test_what_is_no_batch_is_named_and_the_rest_is_taken(live: Service, tmp_path: Path) -> None:
    directory = tmp_path / "spool"
    train(f"file://{directory}", steps=2)
    folder = spool.folders(directory)[0]
    number = max(n for n, _ in spool.batches(folder))
    (folder / f"{number + 1:08}.events").write_bytes(b"\xff" * 7)
    (folder / f"{number + 2:08}.events").write_bytes(b"\x08\0\0\0\0\0\0\0[]      ")
    (directory / ("0" * 32)).symlink_to(tmp_path)
    done = invoke("import", str(directory), env=environment(live))
    assert done.exit_code == 1, done.output
    assert done.stdout.count("cannot be read as a batch of events") == 2
    assert "4 payloads of 2 processes" in done.stdout
    assert live.get("/steps/1/metrics", run="r")["complete"] == "complete"
    for words in (["--run", "x"], ["--new-attempt"]):
        done = invoke("import", str(directory), *words, env=environment(live))
        assert "is a spool, and its files name their runs" in done.stderr
    (tmp_path / "home" / "deadbeef").mkdir()
    done = invoke("import", str(tmp_path / "home"), "--follow", env=environment(live))
    assert "is no spool" in done.stderr


def sender(incarnation: str = "a" * 32) -> tuple[object, ...]:
    return Sender(incarnation, "r", None, "actor", 0).wire()


def test_a_second_link_of_a_process_goes_on_with_its_numbers(tmp_path: Path) -> None:
    for first in (1, 3):
        link = SpoolLink(tmp_path)
        for number in (first, first + 1):
            reply = link.record(sender(), [], {}).result(10)
            assert reply["receipts"] == {}
            path = spool.batch_path(tmp_path, "a" * 32, number)
            assert framing.read_header(path.read_bytes()).payloads == ()
        link.close()
    assert [number for number, _ in spool.batches(tmp_path / ("a" * 32), after=2)] == [3, 4]
    assert SpoolLink(tmp_path).drain("r", 1.0)["drained"]


def test_a_spool_that_cannot_be_written_is_unreachable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    link = SpoolLink(file)
    with pytest.raises(Unreachable, match=r"the spool .*file: Not a directory"):
        link.record(sender(), [], {}).result(10)
    with pytest.raises(Unreachable, match="has no numbers"):
        link.metrics("r", None, 5).result(10)


@pytest.mark.parametrize("body", [b"", b"\x05\0\0\0\0\0\0\0{}", b"\x02\0\0\0\0\0\0\0[]"])
def test_a_header_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInput, match="cannot be read as a batch of events"):
        framing.read_header(body)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Run the block with the rights of nobody, where this is root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_spool_of_another_user_is_refused_in_words() -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        folder = Path(directory, "0123456789abcdef")
        spool.write(folder / spool.SENDER, b"{}")
        assert spool.folders(Path(directory)) == [folder]
        folder.chmod(0o700 if os.geteuid() == 0 else 0)
        with another_user(), pytest.raises(InvalidInput, match="cannot be read by this user"):
            spool.folders(Path(directory))
        folder.chmod(0o700)
