"""`make demo`: a service, a training that is killed in the middle of a step, and its answers.

It starts the service on its own Ray cluster and trains on it. While the job runs, it requests an
msprobe capture. It kills driver and workers with SIGKILL inside a stage, restarts them from the
last checkpoint, and queries the live API. It exits with 0 only if every check passed. All files
are in `.demo/` of the repository. With `KEEP=1` the service stays up and the training continues
until the service is stopped. `PATIENCE=3` triples all timeouts, for slow machines. `PORT=8701`
sets the service's port.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from examples.countdown.demo_report import (
    Checks,
    heading,
    require,
    show_access,
    show_attempts,
    show_dumps,
    show_lost,
    show_metrics,
    show_operators,
    show_rounds,
    show_stages,
)
from examples.countdown.tokenizer import write_tokenizer
from stagescope.session import Session, attach
from stagescope_wire.errors import StagescopeError
from stagescope_wire.schema import STAGES

ROOT: Final = Path(__file__).resolve().parents[3] / ".demo"
_LOCK: Final = ROOT / "lock"
RUN: Final = "countdown"
ALGORITHM: Final = "ppo"
"""PPO has all eight stages; GRPO has no critic and so two less."""
RANKS: Final = 2
CAPTURED_STEP: Final = 3
KILLED_STEP: Final = 6
KILLED_STAGE: Final = "actor_update"
LAST_STEP: Final = 8
GOES_ON: Final = ("--steps", "100000", "--save-every", "10", "--step-seconds", "3")
"""Arguments of the training that `KEEP=1` leaves running."""
CAPTURE: Final[dict[str, Any]] = {
    "run": RUN,
    "steps": [CAPTURED_STEP],
    "stages": ["actor_compute_log_prob"],
    "config": {"task": "statistics", "level": "mix", "statistics": {"summary_mode": "statistics"}},
}

_SHOWN: Final = ("started", "resumed", "warm-up", "step ")
_Value = TypeVar("_Value")


class Training:
    """One start of the training: its driver process, and a selection of its output."""

    def __init__(self, address: str, attempt: int, *options: str) -> None:
        self.log = ROOT / f"attempt-{attempt}.log"
        self.pid_file = ROOT / f"attempt-{attempt}.pids.json"
        command = [sys.executable, "-m", "examples.countdown.train", "--address", address]
        command += ["--run", RUN, "--algorithm", ALGORITHM, "--ranks", str(RANKS)]
        command += ["--checkpoint-dir", str(ROOT / "checkpoints"), "--steps", str(LAST_STEP)]
        command += ["--pid-file", str(self.pid_file), *options]
        with self.log.open("w") as log:
            # In a session of its own: Ctrl-C ends the demo, which then ends the training.
            self.process = subprocess.Popen(
                command, env=environment(), stdout=log, stderr=log, start_new_session=True
            )
        self.is_shown = True
        """Whether lines of the log are printed."""
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def pids(self) -> list[int]:
        """Return the ids of driver and workers, the driver's first."""
        pids = json.loads(self.pid_file.read_text())
        return [pids["driver"], *pids["workers"].values()]

    def ensure_alive(self) -> None:
        """Raise if the driver has ended."""
        code = self.process.poll()
        require(code is None, f"the training ended with {code}, see {self.log}")

    def wait(self, seconds: float) -> None:
        """Wait for the training's end, which must be successful."""
        wait_for(
            "the end of the training",
            lambda: self.process.poll() is not None,
            seconds=seconds,
            progress=self.last_line,
        )
        code = self.process.wait()
        self._reader.join(5)
        require(code == 0, f"the training ended with {code}, see {self.log}")

    def last_line(self) -> str:
        """Describe the training's last line of output, and the path of the others."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").split("\n")
            if last := next((line.strip() for line in reversed(lines) if line.strip()), ""):
                return f"its last line is '{last:.200}', the others are in {self.log}"
        return f"it has written nothing yet to {self.log}"

    def kill(self) -> list[int]:
        """Kill driver and workers, and no other process."""
        pids = self.pids()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        return pids

    def _follow(self) -> None:
        """Print a selection of the log's lines, until the process has ended."""
        with self.log.open(errors="replace") as log:
            while True:
                ended = self.process.poll() is not None
                for line in log:
                    if self.is_shown and line.startswith(_SHOWN):
                        print("\n".join(_folded(line.strip())), flush=True)
                if ended:
                    return
                time.sleep(0.1)


def environment() -> dict[str, str]:
    """Return this process's environment with the settings of the demo's service."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("STAGESCOPE_", "RAY_ADDR"))
    }
    own = {
        "STAGESCOPE_HOME": str(ROOT / "home"),
        # A killed process is detected after 15 s instead of 45: the demo waits for it.
        "STAGESCOPE_POLL_SECONDS": "5",
        "STAGESCOPE_LEASE_SECONDS": "15",
        "STAGESCOPE_TOKENIZER": str(ROOT / "tokenizer.json"),
        "PYTHONUNBUFFERED": "1",
    }
    return {**inherited, **own}


def stagescope(*arguments: str) -> Any:
    """Run the command line with `--json` and return its output."""
    program = Path(sys.executable).with_name("stagescope")
    done = subprocess.run(
        [str(program), *arguments, "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120 * patience(),
    )
    require(done.returncode == 0, f"stagescope {arguments[0]}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout)


def patience() -> float:
    """Return the factor for all timeouts, from the variable PATIENCE; at least 1."""
    try:
        return max(1.0, float(os.environ.get("PATIENCE") or 1))
    except ValueError:
        return 1.0


def wait_for(
    name: str,
    poll: Callable[[], _Value | None],
    *,
    seconds: float,
    ensure_alive: Callable[[], None] = lambda: None,
    progress: Callable[[], str] = lambda: "",
) -> _Value:
    """Poll until there is a result, and return it.

    Args:
        name: name of the result, for the message.
        poll: returns the result once it is true.
        seconds: the timeout on a machine of usual speed; multiplied by `patience()`.
        ensure_alive: raises where waiting is useless.
        progress: describes the progress, for the message.

    Raises:
        AssertionError: there was no result in time, or `ensure_alive` raised.
    """
    seconds *= patience()
    deadline = time.monotonic() + seconds
    reason = ""
    while time.monotonic() < deadline:
        ensure_alive()
        try:
            found = poll()
        except StagescopeError as error:
            found, reason = None, f" ({error})"
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(
        f"waited {seconds:.0f} s for {name}{reason}, which may be too short for a slow machine: "
        f"`PATIENCE={2 * patience():.0f} make demo` waits twice as long. {progress()}".rstrip()
    )


def open_stages(session: Session) -> list[dict[str, object]] | None:
    """Return the ranks that are inside the stage in which the job will be killed."""
    stages = session.step(KILLED_STEP, run=RUN, attempt=1).stages()
    open_ranks = [row for row in stages.where(stage=KILLED_STAGE) if row["status"] == "open"]
    return open_ranks if len(open_ranks) == RANKS else None


def first_attempt(session: Session, address: str, checks: Checks) -> None:
    """Train, capture, and kill."""
    training = Training(address, 1, "--pause-at-step", str(KILLED_STEP))
    try:
        with checks.check("a capture requested over HTTP while the job runs"):
            wait_for(
                "the run",
                lambda: RUN in session.runs()["run"],
                seconds=60,
                ensure_alive=training.ensure_alive,
                progress=training.last_line,
            )
            requested = session.capture(**CAPTURE)
            print(f"capture {requested['capture_id']}: step {CAPTURED_STEP}, msprobe statistics")
        with checks.check(f"the job killed in the middle of step {KILLED_STEP}"):
            inside = wait_for(
                f"{KILLED_STAGE} of step {KILLED_STEP} on {RANKS} ranks (the warm-up comes before)",
                lambda: open_stages(session),
                seconds=120,
                ensure_alive=training.ensure_alive,
                progress=training.last_line,
            )
            heading("SIGKILL")
            for row in inside:
                print(f"open        {row['stage']}  {row['role']} rank {row['rank']}")
            print(f"killed pids {', '.join(map(str, training.kill()))}")
            require(session.get("/healthz"), "the service does not answer")
            print("the service answers")
    finally:
        if training.process.poll() is None:
            training.process.terminate()


def second_attempt(session: Session, address: str, checks: Checks) -> None:
    """Continue from the checkpoint; with KEEP=1 the training goes on beyond the demo."""
    heading("attempt 2, from the last checkpoint")
    training = Training(address, 2, "--resume", *(GOES_ON if is_kept() else ()))
    goes_on = False
    try:
        if not is_kept():
            with checks.check("attempt 2 goes on from the checkpoint and ends well"):
                training.wait(150)
            return
        with checks.check("attempt 2 goes on from the checkpoint"):
            wait_for(
                f"step {LAST_STEP}",
                lambda: any(
                    row["step"] == LAST_STEP and row["measured"] for row in session.steps(RUN, 2)
                ),
                seconds=150,
                ensure_alive=training.ensure_alive,
                progress=training.last_line,
            )
            goes_on = True
    finally:
        training.is_shown = False
        if not goes_on and training.process.poll() is None:
            training.process.terminate()


def is_kept() -> bool:
    """Return whether service and training stay up: the variable KEEP."""
    return os.environ.get("KEEP", "") not in ("", "0")


def answers(session: Session, info: dict[str, Any], checks: Checks) -> None:
    """Query the live service and print its answers."""
    heading("step metrics of both attempts")
    with checks.check("step metrics of both attempts"):
        last, killed = KILLED_STEP - 1, KILLED_STEP
        show_metrics(session, RUN, [(1, last), (1, killed), (2, killed)])
        print(f"attempt 1 was killed inside step {killed}; attempt 2 did the same step again")
        steps = session.steps(RUN)
        closed = {(r["attempt"], r["step"]) for r in steps if r["measured"]}
        expected = {(1, s) for s in range(1, KILLED_STEP)}
        expected |= {(2, s) for s in range(KILLED_STEP, LAST_STEP + 1)}
        require(expected <= closed, f"not measured: {sorted(expected - closed)}")
    heading(f"step {LAST_STEP} by round")
    with checks.check("the per-round table, which adds up to the whole"):
        show_rounds(session, RUN, LAST_STEP)
    heading(f"the stages of step {LAST_STEP}")
    with checks.check(f"all {len(STAGES)} stages of a step"):
        show_stages(session, RUN, LAST_STEP, set(STAGES))
    heading("in flight and lost at the kill")
    with checks.check("what was in flight and lost at the kill"):
        wait_for(
            "the end of the killed processes' leases",
            lambda: len(session.lost(run=RUN, attempt=1)),
            seconds=40,
        )
        show_lost(session, RUN, KILLED_STEP)
    heading("attempts")
    with checks.check("two attempts, the second continuing the first"):
        show_attempts(session, RUN, KILLED_STEP - 1)
    heading(f"msprobe's dumps of step {CAPTURED_STEP}")
    with checks.check("the dumps' place, whole on every rank"):
        show_dumps(session, RUN, CAPTURED_STEP, RANKS)
    heading(f"operators of step {CAPTURED_STEP}, rank 0")
    with checks.check("the operators of the captured step"):
        wait_for(
            "the operators",
            lambda: len(session.step(CAPTURED_STEP, run=RUN, attempt=1).operators(limit=1)),
            seconds=30,
        )
        show_operators(session, RUN, CAPTURED_STEP)
    heading("ask it yourself")
    with checks.check("the URL and the token's place, and no answer without a token"):
        show_access(info["url"], Path(info["token_file"]), LAST_STEP)


@contextlib.contextmanager
def service() -> Iterator[dict[str, Any]]:
    """Start the service in `.demo/`, and stop it at the end unless KEEP=1."""
    if (ROOT / "home" / "service.json").exists():
        print(f"the demo that was left up is stopped, and {ROOT} is emptied")
        with contextlib.suppress(Exception):  # left up by KEEP=1, or long gone
            stagescope("stop")
    for old in [path for path in ROOT.iterdir() if path != _LOCK]:
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    write_tokenizer(ROOT / "tokenizer.json")
    port = os.environ.get("PORT") or ("8700" if _is_free(8700) else "0")
    if port == "0":
        print("port 8700 is taken: another is used")
    # 'local' is a cluster of its own, whatever else runs on this machine.
    info = stagescope(
        "serve", "--data-dir", str(ROOT / "data"), "--port", port, "--address", "local"
    )
    try:
        yield info
    finally:
        if not is_kept():
            with contextlib.suppress(Exception):
                stagescope("stop")
        else:
            home, program = ROOT / "home", Path(sys.executable).with_name("stagescope")
            print(f"\nThe service is left up: open {info['url']} and paste what {home} holds in")
            print("read.token (to look), or operate.token (to arm captures, too).")
            print("Ask it in a terminal, after these two lines:")
            print(f"  export STAGESCOPE_HOME={home}")
            print(f"  export PATH={os.path.abspath(program.parent)}:$PATH")
            print("  stagescope doctor; stagescope top; stagescope report")
            print("The training goes on, too, a step every three seconds. To stop both:")
            print("  stagescope stop")


def main() -> int:
    """Run the demo; return 0 only if every check passed."""
    ROOT.mkdir(exist_ok=True)
    with _LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another demo runs in {ROOT}", file=sys.stderr)
            return 1
        # Exit by an exception, so that the service and the training are stopped.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        return run_demo()


def run_demo() -> int:
    """Run the demo; the caller holds the lock of its folder."""
    begin = time.monotonic()
    checks = Checks()
    os.environ.update(environment())
    heading("service")
    with service() as info:
        print(f"url     {info['url']}\ntoken   {info['token_file']}\ncluster {info['address']}")
        with attach() as session:
            with checks.check("the service is up, on a cluster of its own"):
                wait_for("readiness", lambda: session.get("/readyz"), seconds=60)
                require(info["cluster"] == "embedded", f"cluster: {info['cluster']}")
            heading("attempt 1")
            first_attempt(session, info["address"], checks)
            second_attempt(session, info["address"], checks)
            answers(session, info, checks)
        heading(f"{time.monotonic() - begin:.0f} s")
        print("\n".join(checks.lines()), flush=True)
    return 1 if checks.failed else 0


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _folded(line: str) -> list[str]:
    """Break a line at commas, to be read at 80 columns."""
    pieces = [""]
    for part in line.split(", "):
        if pieces[-1] and len(pieces[-1]) + len(part) > 76:
            pieces.append("  ")
        pieces[-1] += part if not pieces[-1].strip() else f", {part}"
    return pieces


if __name__ == "__main__":
    sys.exit(main())
