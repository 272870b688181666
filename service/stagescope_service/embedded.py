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
from pathlib import Path
from typing import Any, Final

from stagescope.wire.errors import NotReady

_START_SECONDS: Final = 90.0
_STOP_SECONDS: Final = 20.0
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
    """End the cluster that `pid` keeps; return whether it was running."""
    if not is_ours(pid, home):
        return False
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while is_ours(pid, home):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.05)
    return True


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
