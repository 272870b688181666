"""`stagescope top` on a real terminal: a pty of 80 x 24, keys, signals, a service that goes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke
from tests.support.measure import payload
from tests.support.runs.shown import RUN, shown
from tests.support.stores import eventually

from stagescope.session import Session
from stagescope.top import RunReader, RunSnapshot, screen
from stagescope_wire.render import Line
from stagescope_wire.schema import BEGIN

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"
STYLE = re.compile(r"\x1b\[[0-9;]*m")
PROGRAM = "from stagescope.cli import main; main()"


class Terminal:
    """A command on a pty, and what it drew."""

    def __init__(self, *words: str, rows: int = 24, columns: int = 80, **environment: str) -> None:
        self._controller, terminal = pty.openpty()
        self.resize(rows, columns, signalled=False)
        self.mode = termios.tcgetattr(terminal)
        self._terminal = terminal
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm",
               **environment}  # fmt: skip
        for name in ("COLUMNS", "LINES"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            stdin=terminal, stdout=terminal, stderr=terminal, env=env, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.seen = ""

    def resize(self, rows: int, columns: int, *, signalled: bool = True) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._controller, termios.TIOCSWINSZ, size)
        if signalled:
            self.process.send_signal(signal.SIGWINCH)

    def press(self, keys: str) -> None:
        os.write(self._controller, keys.encode())

    def read(self, seconds: float = 0.2) -> None:
        """Take what was written within some seconds."""
        while select.select([self._controller], [], [], seconds)[0]:
            try:
                self.seen += os.read(self._controller, 1 << 16).decode("utf-8", "replace")
            except OSError:  # the other side is closed
                return
            seconds = 0.0

    @property
    def frames(self) -> list[list[str]]:
        """The complete frames, each as its lines without colours."""
        found = [part.partition("\x1b[J") for part in self.seen.split("\x1b[H")[1:]]
        return [
            STYLE.sub("", text.removesuffix("\x1b[K")).split("\x1b[K\r\n")
            for text, end, _ in found if end
        ]  # fmt: skip

    def wait_for(
        self, condition: Callable[[list[str]], object], seconds: float = 60.0
    ) -> list[str]:
        """Return the first new frame of which the condition is true."""
        deadline = time.monotonic() + seconds
        start = len(self.frames)
        while True:
            self.read()
            for frame in self.frames[max(start - 1, 0) :]:
                if condition(frame):
                    return frame
            assert self.process.poll() is None, self.seen[-2000:]
            assert time.monotonic() < deadline, self.seen[-2000:]

    def wait_for_text(self, text: str) -> list[str]:
        return self.wait_for(lambda frame: text in "\n".join(frame))

    def end(self) -> int:
        """Wait until the command has ended by itself; return its status."""
        deadline = time.monotonic() + 30.0
        while self.process.poll() is None:
            self.read(0.05)
            assert time.monotonic() < deadline, self.seen[-2000:]
        self.read(0.0)
        return self.process.returncode

    def is_restored(self) -> bool:
        """Whether the terminal is as it was: its mode, its screen, its cursor."""
        same = termios.tcgetattr(self._terminal)[:4] == self.mode[:4]
        return same and self.seen.rstrip().endswith(f"\x1b[?25h{LEAVE}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for descriptor in (self._controller, self._terminal):
            os.close(descriptor)


@contextlib.contextmanager
def top(live: Service, *words: str, **arguments: Any) -> Iterator[Terminal]:
    assert live.tokens is not None
    terminal = Terminal(
        "top", *words, "--url", live.server.url, "--every", "0.2",
        STAGESCOPE_TOKEN=live.tokens.read, **arguments,
    )  # fmt: skip
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        yield running


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A run in step 35: five of eight ranks have generated, one is in the next stage."""
    with service(tmp_path_factory.mktemp("home")) as running:
        training = shown(running, 34, rows=2, tokens=24)
        capture_id = training.capture()
        training.acknowledge(capture_id, range(7))
        for rank in range(5):
            training.actors[rank].end("rollout_generate", 35)
        training.actors[0].begin("actor_compute_log_prob", 35)
        yield running


def fits(frame: list[str], rows: int, columns: int) -> bool:
    return len(frame) <= rows and all(len(line) <= columns for line in frame)


def test_a_run_on_80_by_24(trained: Service) -> None:
    with top(trained, RUN) as terminal:
        frame = terminal.wait_for_text("STEP")
        assert terminal.seen.startswith(ENTER)
        text = "\n".join(frame)
        assert f"{RUN}  attempt 2, live, 8 processes" in frame[0]
        # The numbers are those of the API.
        metrics = trained.get("/steps/34/metrics", run=RUN)["metrics"]
        row = next(line for line in frame if line.split()[:1] == ["34"])
        assert row.split()[1:3] == ["comparable", "complete"]
        assert row.split()[3] == f"{metrics['rollout_corr/k3_kl']:.4g}"
        assert next(line for line in frame if line.split()[:1] == ["33"]).split()[1] == "suspect"
        # Stages in the order of training; who is done, inside, absent.
        ranks = next(at for at, line in enumerate(frame) if line.startswith("RANKS in step 35"))
        assert frame[ranks + 1].split()[:3] == ["rollout_generate", "#####>>>", "5/8"]
        assert "actor 5-7, " in frame[ranks + 1]
        assert frame[ranks + 2].split()[:3] == ["actor_compute_log_prob", ">.......", "0/8"]
        rounds = trained.get("/steps/34/rounds", run=RUN)["rows"]
        worst = max(rounds, key=lambda each: each["abs_diff_mean"])
        assert f"WORST of 4 ROUNDS of step 34: {worst['round']}, {worst['tokens']} tokens" in text
        assert f"mean |d| {worst['abs_diff_mean']:.4g}" in text
        assert "error   step 33" in text
        assert "asked     actor_update" in text
        assert STYLE.search(terminal.seen)
        for keys in ("x", "\x1b[A", ""):  # an escape alone quits, an arrow does not
            terminal.press(keys)
            terminal.wait_for_text("STEP")
        # The screen is cleared once, when it is entered; then lines are written over.
        assert terminal.seen.count("\x1b[2J") == 1
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.is_restored()
        assert all(fits(each, 24, 80) for each in terminal.frames)


@pytest.mark.parametrize("how", ["ctrl-c", "term", "escape"])
def test_it_restores_the_terminal_however_it_ends(trained: Service, how: str) -> None:
    with top(trained, RUN, NO_COLOR="1") as terminal:
        terminal.wait_for_text("suspect")
        assert not STYLE.search(terminal.seen)
        if how == "term":
            terminal.process.send_signal(signal.SIGTERM)
        else:
            terminal.press("\x03" if how == "ctrl-c" else "\x1b")
        assert terminal.end() == 0
        assert terminal.is_restored()
        assert "Traceback" not in terminal.seen


def test_it_can_be_suspended(trained: Service) -> None:
    with top(trained, RUN) as terminal:
        terminal.wait_for_text("STEP")
        terminal.press("\x1a")
        deadline = time.monotonic() + 30.0
        while not terminal.seen.endswith(LEAVE):
            terminal.read(0.05)
            assert time.monotonic() < deadline
        assert terminal.is_restored()
        status = Path(f"/proc/{terminal.process.pid}/stat")
        eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "T")
        terminal.process.send_signal(signal.SIGCONT)
        drawn = len(terminal.frames)
        terminal.wait_for(lambda frame: len(terminal.frames) > drawn)
        assert terminal.seen.count(ENTER) == 2
        terminal.press("q")
        assert terminal.end() == 0


def test_it_follows_the_size_of_the_window(trained: Service) -> None:
    with top(trained, RUN) as terminal:
        terminal.wait_for_text("CAPTURES")
        terminal.resize(12, 50)
        small = terminal.wait_for(lambda frame: fits(frame, 12, 50))
        # Every part keeps its title.
        assert [word for line in small[1:] if (word := line.split()[0]).isupper()] == [
            "STEP", "RANKS", "WORST", "FINDINGS,", "CAPTURES",
        ]  # fmt: skip
        assert small[-1] == "q quits"
        terminal.resize(50, 120)
        large = terminal.wait_for(lambda frame: len(frame) > 20)
        assert fits(large, 50, 120)


def test_a_new_step_appears(live: Service) -> None:
    rank = Rank(live, world_size=1)
    rank.stage("actor_compute_log_prob", 1, payload())
    rank.begin("rollout_generate", 2)
    with top(live) as terminal:
        terminal.wait_for_text("RANKS in step 2")
        rank.end("rollout_generate", 2)
        rank.stage("actor_compute_log_prob", 2, payload(seed=1))
        rank.begin("rollout_generate", 3)
        frame = terminal.wait_for_text("RANKS in step 3")
        assert any(line.split()[:1] == ["2"] for line in frame)


def test_a_run_that_ends_says_why(live: Service) -> None:
    rank = Rank(live, world_size=1)
    rank.begin("rollout_generate", 1)
    with top(live, "r") as terminal:
        terminal.wait_for_text("attempt 1, live")
        live.engine.fall_silent(rank)
        frame = terminal.wait_for_text("ended")
        assert "its processes fell silent" in frame[0]
        assert any(line.split()[:2] == ["rollout_generate", "!"] for line in frame)
        terminal.press("q")
        assert terminal.end() == 0


def test_a_service_that_goes_is_said(live: Service) -> None:
    Rank(live, world_size=1).begin("rollout_generate", 1)
    with top(live, "r", "--timeout", "10") as terminal:
        terminal.wait_for_text("RANKS in step 1")
        port = int(live.server.url.rpartition(":")[2])
        live.server.stop()
        frame = terminal.wait_for_text("no answer")
        # What was known stays.
        assert any(line.startswith("RANKS in step 1") for line in frame)
        assert fits(frame, 24, 80)
        live.server._requested_port = port
        live.server.start()
        terminal.wait_for(lambda frame: "no answer" not in "\n".join(frame))
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.is_restored()


def test_no_service_is_an_error_and_leaves_the_terminal_alone() -> None:
    terminal = Terminal("top", "r", "--url", "http://127.0.0.1:9", "--timeout", "1")
    try:
        assert terminal.end() == 3
        assert "cannot be reached" in terminal.seen
        assert ENTER not in terminal.seen
    finally:
        terminal.close()


def test_once_prints_one_screen(trained: Service) -> None:
    assert trained.tokens is not None
    env = {"STAGESCOPE_TOKEN": trained.tokens.read}
    for words in (["--once"], []):  # a pipe is no terminal
        result = invoke("top", RUN, *words, "--url", trained.server.url, env=env)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "\x1b" not in result.stdout
        lines = result.stdout.splitlines()
        assert fits(lines, 24, 80)
        assert "q quits" not in result.stdout
    for words in (["nobody"], ["--run", "nobody"]):
        result = invoke("top", *words, "--once", "--url", trained.server.url, env=env)
        assert result.exit_code == 4


def test_1024_ranks_fit(live: Service) -> None:
    ranks = [Rank(live, rank=rank, world_size=1024, greets=False) for rank in range(1024)]
    live.engine.take_together([rank.hello for rank in ranks])
    live.engine.take_together([
        *(rank.draft_stage("rollout_generate", 1) for rank in ranks[:1000]),
        *(rank.draft(BEGIN, stage="rollout_generate", step=1) for rank in ranks[1000:]),
    ])  # fmt: skip
    with top(live, "r") as terminal:
        frame = terminal.wait_for_text("1000/1024")
        assert fits(frame, 24, 80)
        row = next(line for line in frame if "1000/1024" in line)
        # Of 20 marks the last stands for ranks that are inside.
        assert re.search(r" #{19}> 1000/1024  actor 1000-1023", row)


STEP: dict[str, object] = {"step": 3, "attempt": 1, "complete": "open", "measured": False,
                           "gap": None, "superseded_by": None, "closed_wall": None}  # fmt: skip


def test_an_open_step_is_not_said_to_have_no_numbers() -> None:
    closed = {**STEP, "step": 2, "complete": "complete"}
    lines = [line.text for line in screen_of({"/steps": {"rows": [STEP, closed]}})]
    (opened,) = [line for line in lines if line.startswith(f"{3:>8}  ")]
    (ended,) = [line for line in lines if line.startswith(f"{2:>8}  ")]
    assert "open" in opened
    assert "no numbers" not in opened
    assert "no numbers" in ended


def screen_of(answers: dict[str, object]) -> list[Line]:
    """The screen of a service that gives these answers, and no rows to other questions."""
    answers = {"/series": {"steps": [], "comparable": [], "series": []}, **answers}
    asked = SimpleNamespace(get=lambda path, **_: answers.get(path, {"rows": []}))
    return screen(RunReader(cast("Session", asked), "r").read(), width=80, height=24)


def test_a_rank_that_is_gone_is_marked_where_it_never_began() -> None:
    progress = {"run": "r", "attempt": 1, "step": 3, "complete": "open", "wall": 9.0,
                "expected": {"actor": {"actor_update": [0, 1, 2]}},
                "missing": [{"role": "actor", "stage": "actor_update", "rank": rank,
                             "status": "not begun", "since": 1.0} for rank in (1, 2)]}  # fmt: skip
    lines = screen_of({
        "/steps/latest/stages": progress, "/steps": {"rows": [STEP]},
        "/steps/3/stuck": {"rows": [{"role": "actor", "rank": 1, "process": "silent"},
                                    {"role": "actor", "rank": 2, "process": "gone"}]},
    })  # fmt: skip
    (row,) = [line for line in lines if line.text.startswith("actor_update")]
    assert row.text.split()[1:3] == ["#.!", "1/3"]
    assert row.tone == "bad"


def test_of_a_run_that_restarted_it_shows_the_current_attempt(live: Service) -> None:
    for key, steps in (("first", range(1, 30)), ("second", range(5, 7))):
        rank = Rank(live, key=key, resumed_from_step=steps[0] - 1)
        for step in steps:
            rank.stage("actor_update", step)
    with live.session() as session:
        snapshot = RunReader(session, "r").read()
    found = [(row["step"], row["attempt"]) for row in snapshot.steps]
    assert found == [(6, 2), (5, 2), (4, 1), (3, 1), (2, 1), (1, 1)]
    text = "\n".join(line.text for line in screen(snapshot, width=80, height=24))
    assert "attempt 2, live" in text
    assert re.search(r"\n {7}4 .*of attempt 1\n", text)


def test_findings_of_an_earlier_attempt_come_last_and_name_it() -> None:
    row = {"severity": "error", "message": "m", "step": 9}
    lines = screen_of({
        "/runs/r/attempts": {"rows": [{"attempt": 2, "state": "live"}]},
        "/findings": {"rows": [{**row, "attempt": 1}, {**row, "attempt": 2, "step": 3}]},
    })  # fmt: skip
    texts = [line.text for line in lines if line.text.startswith("error")]
    assert texts == ["error   step 3     m", "error   step 9 of attempt 1 m"]


@pytest.mark.parametrize(
    ("verdict", "tone"), [("comparable", "good"), ("unknown", ""), ("suspect", "bad")]
)
def test_an_unknown_verdict_is_neither_good_nor_bad(verdict: str, tone: str) -> None:
    lines = screen_of({
        "/steps": {"rows": [{**STEP, "complete": "complete", "measured": True}]},
        "/series": {"steps": [3], "comparable": [verdict], "series": [{"values": [0.1]}]},
    })  # fmt: skip
    (row,) = [line for line in lines if f" {verdict} " in line.text]
    assert row.tone == tone


def test_a_step_with_a_token_that_is_not_finite_is_not_good() -> None:
    lines = screen_of({
        "/steps": {"rows": [{**STEP, "complete": "complete", "measured": True}]},
        "/series": {"steps": [3], "comparable": ["comparable"], "nonfinite": [1],
                    "series": [{"values": [0.1]}]},
    })  # fmt: skip
    (row,) = [line for line in lines if " comparable " in line.text]
    assert row.tone == "bad"
    assert row.text.endswith("1 token not finite")


def test_ranks_that_do_not_fit_are_counted_and_each_role_has_a_row() -> None:
    stages = {
        "actor": ["actor_compute_log_prob", "ref_compute_log_prob", "compute_rm_score",
                  "actor_update", "weight_sync"],
        "critic": ["compute_values", "critic_update"],
        "rollout": ["rollout_generate", "weight_sync"],
    }  # fmt: skip
    late = {"role": "actor", "rank": 1, "status": "inside", "since": 1.0}
    progress = {
        "step": 3, "complete": "open", "wall": 9.0,
        "expected": {role: {stage: [0, 1] for stage in own} for role, own in stages.items()},
        "missing": [{**late, "stage": "actor_update"}, {**late, "stage": "weight_sync"},
                    {**late, "role": "critic", "stage": "critic_update", "status": "not begun"}],
    }  # fmt: skip
    row = {"complete": "open", "measured": False, "gap": None, "superseded_by": None}
    snapshot = RunSnapshot(
        run="r", attempt={}, steps=[{**row, "step": step} for step in range(8)], verdicts={},
        nonfinite={}, numbers={}, progress=progress, measured=None, wall=0.0,
        rounds=[{"abs_diff_mean": 0.1, "abs_diff_max": 1.0, "round": 0, "tokens": 1}],
        findings=[{"severity": "error", "step": 1, "message": "m"}] * 8,
        captures=[{"capture_id": "c", "state": "armed"}] * 4, gone=[("actor", 1)],
    )  # fmt: skip

    def shown(height: int) -> list[str]:
        lines = [line.text for line in screen(snapshot, width=80, height=height)]
        assert len(lines) <= height
        begin = next(at for at, line in enumerate(lines) if line.startswith("RANKS"))
        end = next(at for at, line in enumerate(lines) if line.startswith("WORST"))
        return lines[begin:end]

    title, *rows = shown(24)
    assert len(rows) == 4
    assert title.startswith("RANKS in step 3, open, 5 more   # done")
    assert [line.split()[0] for line in rows] == [
        "actor_update", "weight_sync", "critic_update", "rollout_generate",
    ]  # fmt: skip
    assert [line.split()[2] for line in rows] == ["1/2", "1/2", "1/2", "2/2"]
    assert rows[-1].endswith("rollout")
    title, *rows = shown(60)
    assert len(rows) == 9
    assert "more" not in title


def test_hostile_names_and_numbers_do_not_control_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\n<b>\u202e" + "w" * 300
    snapshot = RunSnapshot(
        run=evil, attempt={"attempt": 1, "state": "ended", "end_reason": evil, "processes": 1},
        steps=[{"step": 10**15, "complete": "partial", "measured": True, "gap": evil,
                "superseded_by": None}],
        verdicts={10**15: evil}, nonfinite={10**15: 3}, numbers={"k3_kl": {10**15: float("nan")}},
        progress={"step": 1, "complete": "open", "wall": 9.0, "expected": {evil: {evil: [0, 1]}},
                  "missing": [{"role": evil, "stage": evil, "rank": 1, "status": "not begun",
                               "since": None}]},
        rounds=[{"abs_diff_mean": "nan", "round": 0}], measured=1,
        findings=[{"severity": evil, "step": None, "message": evil}],
        captures=[{"capture_id": evil, "state": evil, "spec": {"stages": [evil]}},
                  {"capture_id": "c1", "state": "armed", "spec": {"stages": "all"}}], wall=0.0,
    )  # fmt: skip
    for width, height in ((80, 24), (40, 8), (200, 60), (1, 1)):
        lines = screen(snapshot, width=width, height=height, problem=evil)
        assert len(lines) <= max(height, 8)
        for line in lines:
            assert line.text.isprintable()
            assert len(line.text) <= max(width, 40)
    assert any(line.text.endswith("all stages") for line in screen(snapshot, width=80, height=60))
