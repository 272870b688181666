"""Nodes of a Ray cluster as `ray start` makes them, each of which can be lost as a machine is.

Every process of a node has the node's mark in its environment: a node is ended by the pids of the
processes that have it, never by a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).parents[2]
_MARK: Final = "STAGESCOPE_TEST_NODE"
_SECONDS: Final = 90.0


def free_port() -> int:
    """Return a port of the loopback interface that nobody holds now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory for Ray: paths of its sockets have at most 107 bytes, and pytest's are longer."""
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


def _token(directory: Path) -> dict[str, str]:
    """Return the variable of a new token for a cluster where this user has none."""
    named = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    if named or (Path.home() / ".ray" / "auth_token").exists():
        return {}
    path = directory.parent / f"{directory.name}.auth_token"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return {"RAY_AUTH_TOKEN_PATH": str(path)}


class Redis:
    """A Redis of one's own on the loopback interface, with a password, that keeps what it is told.

    Raises:
        FileNotFoundError: no redis-server is installed.
    """

    def __init__(self, directory: Path) -> None:
        server = shutil.which("redis-server")
        if server is None:
            raise FileNotFoundError("redis-server")
        directory.mkdir(mode=0o700)
        self.password = secrets.token_hex(16)
        self.port = free_port()
        settings = [
            "bind 127.0.0.1", f"port {self.port}", f"requirepass {self.password}",
            f"dir {directory}", "appendonly yes", "daemonize no",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            [server, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert self._process.stdin is not None
        with self._process.stdin as written:
            written.write("\n".join(settings))
        _await_port(self.port)

    @property
    def address(self) -> str:
        """Its address, as RAY_REDIS_ADDRESS has it."""
        return f"127.0.0.1:{self.port}"

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class RayNodes:
    """The nodes of one cluster on this machine, by name; the head is "head".

    Each has an address of its own on the loopback interface, so that a driver joins the node that
    it names.

    Args:
        directory: of Ray's files; a short path (`short_directory`).
        redis: behind the GCS.
        environment: of all processes of all nodes, beside this process's.
    """

    def __init__(
        self, directory: Path, redis: Redis | None, environment: Mapping[str, str]
    ) -> None:
        self._directory = directory
        self._redis = redis
        self._mark = uuid.uuid4().hex
        self._port = free_port()
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            "RAY_AUTH_MODE": "token",
            **_token(directory),
            "PYTHONPATH": os.pathsep.join(sys.path),
            **environment,
        }

    @property
    def address(self) -> str:
        """The cluster's address."""
        return f"127.0.0.1:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that is to join the cluster."""
        return dict(self._environment)

    def start_head(self) -> None:
        """Start the head node, as `deploy/README.md` has it."""
        words = ["--head", f"--port={self._port}", "--node-ip-address=127.0.0.1", "--num-cpus=0"]
        words.append("--include-dashboard=false")
        environment = {}
        if self._redis is not None:
            environment["RAY_REDIS_ADDRESS"] = self._redis.address
            words.append(f"--redis-password={self._redis.password}")
        # `ray start --head` refuses where a raylet of this machine has the same address: that of
        # another node, which is on another machine in truth, counts only beside this file.
        (self._directory / "ray_current_cluster").unlink(missing_ok=True)
        self._start("head", [*words, f"--temp-dir={self._directory}"], environment)

    def start(
        self, name: str, ip: str, prefix: Sequence[str] = (), resource: str | None = None
    ) -> None:
        """Start another node.

        Args:
            name: of the node, for `kill`.
            ip: of the loopback interface, 127.0.0.2 for example.
            prefix: words of a command that runs `ray start`.
            resource: that the node has one of.
        """
        words = [f"--address={self.address}", f"--node-ip-address={ip}", "--num-cpus=2"]
        if resource is not None:
            words.append(f"--resources={json.dumps({resource: 1})}")
        self._start(name, words, {}, prefix)

    def _start(
        self,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
        prefix: Sequence[str] = (),
    ) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        done = subprocess.run(
            [
                *prefix,
                ray,
                "start",
                *words,
                "--object-store-memory=100000000",
                "--disable-usage-stats",
            ],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env={**self._environment, **environment, _MARK: f"{self._mark}/{name}"},
            cwd=ROOT,
        )
        if done.returncode:
            raise RuntimeError(f"ray start of {name} failed: {done.stdout}{done.stderr}")

    def processes(self, name: str | None = None) -> list[psutil.Process]:
        """Return the processes of a node; None: of every node of this cluster."""
        mark = f"{self._mark}/" if name is None else f"{self._mark}/{name}"
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = process.environ().get(_MARK, "")
                if own == mark or (name is None and own.startswith(mark)):
                    found.append(process)
        return found

    def kill(self, name: str | None = None) -> float:
        """End every process of a node at once (SIGKILL); return when that was (Unix seconds)."""
        lost = time.time()
        # What a process starts while the others are being ended is found by the next look.
        while processes := self.processes(name):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            psutil.wait_procs(processes, timeout=5.0)
        return lost


def _await_port(port: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while not _listens(port):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing listens at port {port}")
        time.sleep(0.02)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
