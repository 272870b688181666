"""A Ray cluster for the service where none runs, kept alive by a process of its own.

`python -m stagescope_service.embedded HOME` starts a local cluster, writes its address and waits.
SIGTERM ends the process and the cluster with everything in it. It is identified by its pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from stagescope_wire.errors import NotReady

_START_SECONDS: Final = 90.0
_STOP_SECONDS: Final = 20.0
_END_SECONDS: Final = 10.0
_OBJECT_STORE: Final = 1 << 30
_MODULE: Final = "stagescope_service.embedded"


def start(home: Path) -> tuple[int, str]:
    """Start a cluster that outlives this process; return its keeper's pid and its address.

    Raises:
        NotReady: it did not start; the message has the last line of its log, and names it.
    """
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = home / "cluster.log"
    address_file = home / "cluster.json"
    address_file.unlink(missing_ok=True)
    with log.open("ab") as output:
        begin = output.tell()
        keeper = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(home)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            close_fds=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and keeper.poll() is None:
        with contextlib.suppress(OSError, ValueError):
            return keeper.pid, str(json.loads(address_file.read_text())["address"])
        time.sleep(0.05)
    if keeper.poll() is None:
        keeper.terminate()
    problem = "the embedded Ray cluster did not start"
    with log.open("rb") as written:
        written.seek(begin)
        lines = written.read().decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    raise NotReady(f"{problem}: {last[:300]}" if last else problem, advice=f"see {log}")


def is_ours(pid: int, home: Path) -> bool:
    """Return whether `pid` is a living keeper of `home`'s cluster (the system reuses pids)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return _MODULE.encode() in command and str(home).encode() in command


def stop(pid: int, home: Path) -> bool:
    """End the cluster that `pid` keeps, with all its processes; return whether it was running.

    Ray cannot end a cluster whose head is dead: its actors would go on writing to the catalogue.
    """
    if not is_ours(pid, home):
        return False
    started = _descendants(pid)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while is_ours(pid, home):
        if time.monotonic() > deadline:
            started |= _descendants(pid)
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    _end_all(started)
    return True


def _end_all(processes: set[_Process]) -> None:
    """End the processes that still run, and wait until they have."""
    deadline = time.monotonic() + _END_SECONDS
    while left := processes & {each.process for each in _running()}:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


class _Process(NamedTuple):
    pid: int
    began: int
    """Its start in clock ticks since the system's start, because a pid is reused."""


class _Running(NamedTuple):
    process: _Process
    parent: int


def _descendants(pid: int) -> set[_Process]:
    """Return the processes that a process and its children have started."""
    children: dict[int, list[_Process]] = {}
    for process, parent in _running():
        children.setdefault(parent, []).append(process)
    found: set[_Process] = set()
    due = [pid]
    while due:
        own = children.get(due.pop(), [])
        found.update(own)
        due += [process.pid for process in own]
    return found


def _running() -> Iterator[_Running]:
    """Yield the processes of this machine that have not ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name, in parentheses, may hold anything.
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            # The first thread may have ended before the others, which hold the ports.
            if fields[0] not in ("Z", "X") or int(fields[17]) > 1:
                yield _Running(_Process(int(folder.name), int(fields[19])), int(fields[1]))


def main(home: Path) -> None:
    """Keep a cluster until SIGTERM."""
    import ray

    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    context: Any = ray.init(  # untyped in ray
        address="local",
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE,
        log_to_driver=False,
    )
    address_file = home / "cluster.json"
    temporary = address_file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"address": context.address_info["gcs_address"]}))
    os.replace(temporary, address_file)
    done.wait()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
