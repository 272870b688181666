"""Which cluster the service goes to, and whose service is stopped, where several clusters run."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi import FastAPI

ray = pytest.importorskip("ray")
from tests.support.answering import serving, unused_port  # noqa: E402
from tests.support.cluster import eventually  # noqa: E402
from tests.support.command_line import Home  # noqa: E402
from tests.support.ray_nodes import short_directory  # noqa: E402

from stagescope_service import clusters  # noqa: E402
from stagescope_wire.errors import InvalidInput, Unreachable  # noqa: E402

pytestmark = pytest.mark.ray

DRIVER = """
import sys
import ray

context = ray.init(
    address="local", num_cpus=1, object_store_memory=100_000_000, include_dashboard=False
)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
ACTORS = """
import sys
import ray
from ray.util import list_named_actors

import stagescope_service.clusters

with stagescope_service.clusters.joined(sys.argv[1]):
    names = [each["name"] for each in list_named_actors(all_namespaces=True)]
    print(sorted(name for name in names if name))
"""


TRAINING = """
import sys
import ray
from stagescope_workers import finish, init

init(run="a/b")
ray.init(sys.argv[1])
print("finished", finish(timeout=60))
"""


class Machine:
    """Commands of a user of this machine, with a place for what `ray start` writes down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left = path / "ray" / "ray_current_cluster"

    def home(self, name: str) -> Path:
        return self.path / name

    def file(self, name: str) -> dict[str, Any] | None:
        return Home(self.home(name), self.path).file()

    def call(
        self, name: str, *arguments: str, ray_tmpdir: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        return Home(self.home(name), ray_tmpdir or self.path, **environ).call(*arguments)

    def calls(
        self, commands: Mapping[str, Sequence[str]]
    ) -> dict[str, subprocess.CompletedProcess[str]]:
        """Run commands of several homes side by side, by home."""
        with concurrent.futures.ThreadPoolExecutor() as threads:
            running = {name: threads.submit(self.call, name, *words)
                       for name, words in commands.items()}  # fmt: skip
        return {name: done.result() for name, done in running.items()}

    def json(self, name: str, *arguments: str) -> Any:
        return Home(self.home(name), self.path).json(*arguments)

    def actors(self, address: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", ACTORS, address],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.strip()


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with short_directory() as path:
        made = Machine(path)
        made.left.parent.mkdir()
        yield made


@contextlib.contextmanager
def driver() -> Iterator[str]:
    """A program with a cluster of its own; yields its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            yield next(line.strip() for line in process.stdout if line[:1].isdigit())
        finally:
            process.stdin.close()
            process.wait(60)


@pytest.fixture(scope="module")
def private() -> Iterator[str]:
    with driver() as address:
        yield address


@pytest.fixture(scope="module")
def left(machine: Machine, private: str) -> Iterator[str]:
    """A cluster that `ray start` left, beside the one of a driver."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    host = private.rpartition(":")[0]
    before = {process.pid for process in psutil.process_iter()}
    options = ["--include-dashboard=false", "--num-cpus=2", "--object-store-memory=100000000"]
    subprocess.run(
        ["ray", "start", "--head", f"--port={port}", f"--node-ip-address={host}", *options],
        executable=str(Path(sys.executable).with_name("ray")),
        check=True,
        capture_output=True,
        timeout=110,
        env={**os.environ, "RAY_TMPDIR": str(machine.path)},
    )
    try:
        yield f"{host}:{port}"
    finally:
        session = str(machine.left.parent)
        for process in psutil.process_iter(["cmdline"]):
            if process.pid not in before and session in " ".join(process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that another program holds."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def test_a_cluster_that_cannot_start_says_why(machine: Machine) -> None:
    deep = machine.path / ("a-path-that-no-socket-can-have" * 4)
    deep.mkdir()
    done = machine.call("deep", "serve", "--port", "0", ray_tmpdir=deep)
    assert done.returncode == 3, done.stderr
    assert "the embedded Ray cluster did not start: " in done.stderr
    assert "AF_UNIX path length" in done.stderr
    assert "cluster.log" in done.stderr


def test_an_address_without_a_cluster_is_said_at_once(machine: Machine) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # it does not listen
        port = unused.getsockname()[1]
        calls = {
            host: ("serve", "--address", f"{host}:{port}")
            for host in ("127.0.0.1", "localhost", "[::1]")
        }
        for home, done in machine.calls(calls).items():
            assert done.returncode != 0
            assert "nothing listens there" in done.stderr
            assert machine.file(home) is None


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "ray://127.0.0.1:10001"])
def test_another_address_of_ray_is_refused_at_once(machine: Machine, address: str) -> None:
    begun = time.monotonic()
    for done in (
        machine.call("odd", "serve", RAY_ADDRESS=address),
        machine.call("odd", "serve", "--address", address),
        machine.call("odd", "stop", RAY_ADDRESS=address),
    ):
        assert done.returncode != 0
        assert f"{address!r} is not the address of a Ray cluster, but the address of" in done.stderr
        assert "expected host:port of the head node" in " ".join(done.stderr.split())
    assert time.monotonic() - begun < 60  # Ray Client alone waits for 30 s, three times
    assert machine.file("odd") is None


def test_a_server_that_is_no_head_node_is_not_waited_for(
    machine: Machine, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusters, "_GREETING_SECONDS", 0.5)
    with serving(FastAPI()) as url:
        for address in (url.removeprefix("http://"), f"127.0.0.1:{taken}"):
            with (
                pytest.raises(Unreachable, match="does not answer as the head node"),
                clusters.joined(address),
            ):
                pass


def test_auto_is_the_cluster_of_this_machine_that_answers(
    monkeypatch: pytest.MonkeyPatch, private: str, taken: int
) -> None:
    def known(left: str | None, *others: str) -> None:
        monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: left)
        monkeypatch.setattr(clusters, "_local_addresses", lambda: frozenset(others))

    gone = f"127.0.0.1:{unused_port()}"
    known(gone, private)
    assert clusters._on_this_machine() == private
    known(private, f"127.0.0.1:{taken}")
    assert clusters._on_this_machine() == private
    known(None, private, f"127.0.0.1:{taken}")
    with pytest.raises(InvalidInput, match="may be any of the Ray clusters"):
        clusters._on_this_machine()
    for left in (gone, None):
        known(left)
        with pytest.raises(Unreachable, match="none answers"), clusters.joined("auto"):
            pass


def test_no_cluster_of_a_driver_is_joined_unasked(machine: Machine, private: str) -> None:
    assert not machine.left.exists()
    data = machine.home("fresh") / "data"
    data.mkdir(mode=0o755, parents=True)
    done = machine.call("fresh", "serve", "--port", "0", "--json")
    try:
        assert done.returncode == 0, done.stderr
        assert f"note: others may read {data} (mode 755)" in done.stderr
        assert {file.stat().st_mode & 0o777 for file in data.glob("catalogue.db*")} == {0o600}
        assert json.loads(done.stdout)["cluster"] == "embedded"
        assert json.loads(done.stdout)["address"] != private
        (note,) = [line for line in done.stderr.splitlines() if "did not join" in line]
        assert private in note
        assert "--address" in note
        # Another cluster beside the one that this home's service is in: two for one catalogue.
        beside = machine.call("fresh", "serve", "--port", "0", "--address", private)
        assert beside.returncode != 0
        assert "one service a home" in beside.stderr
        assert machine.json("fresh", "serve")["already_running"]
    finally:
        assert machine.json("fresh", "stop") == {"stopped": True}
    assert machine.actors(private) == "[]"


def test_serve_without_a_cluster_starts_one_and_stop_ends_it_and_no_other(
    machine: Machine, private: str
) -> None:
    started = machine.json("own", "serve", "--address", "local", "--port", "0")
    assert (started["cluster"], started["already_running"]) == ("embedded", False)
    written = machine.file("own")
    assert written is not None
    keeper = psutil.Process(written["embedded_pid"])
    try:
        again = machine.json("own", "serve", "--port", "0")
        assert (again["cluster"], again["already_running"]) == ("embedded", True)
        assert (again["url"], again["address"]) == (started["url"], started["address"])
        assert machine.json("own", "status")["ready"]
        # As `serve` prints it: the address in the script, and the variable.
        done = subprocess.run(
            [sys.executable, "-c", TRAINING, started["address"]],
            env={**os.environ, "RAY_AUTH_MODE": "token", "STAGESCOPE_HOME": "/nonexistent"},
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert "finished True" in done.stdout, done.stderr
        said = [line for line in done.stderr.splitlines() if "connected to the Ray" in line]
        run = "a-b-c14cddc0"
        assert [line.rpartition("its page: ")[2] for line in said] == [
            f"{started['url']}/#/runs/{run}"
        ]
    finally:
        stopped = machine.json("own", "stop")
    assert stopped == {"stopped": True}
    assert not keeper.is_running() or keeper.status() == psutil.STATUS_ZOMBIE
    assert machine.actors(private) == "[]"  # the cluster of a driver lives on
    assert machine.json("own", "stop") == {"stopped": False}


def test_a_start_that_fails_leaves_nothing(machine: Machine, private: str, taken: int) -> None:
    before = {"url": None, "embedded_pid": None, "x": 1}
    machine.home("failing").mkdir()
    (machine.home("failing") / "service.json").write_text(json.dumps(before))
    start = ("serve", "--port", str(taken), "--address", private)
    for home, done in machine.calls({"failing": start, "failing-anew": start}).items():
        assert done.returncode != 0
        assert "is taken" in done.stderr
        assert machine.file(home) == (before if home == "failing" else None)
    assert machine.actors(private) == "[]"


def test_a_port_that_is_taken_starts_no_cluster(machine: Machine, taken: int) -> None:
    done = machine.call("early", "serve", "--port", str(taken), "--address", "local")
    assert done.returncode != 0
    assert f"is taken by pid {os.getpid()}" in done.stderr
    assert machine.file("early") is None
    assert not [*machine.home("early").rglob("*ray*")]


def test_a_start_that_fails_ends_the_cluster_that_it_started(
    machine: Machine, private: str
) -> None:
    before = {"url": "http://127.0.0.1:9", "cluster_address": private, "cluster": "joined"}
    machine.home("alone").mkdir()
    (machine.home("alone") / "service.json").write_text(json.dumps(before))
    done = machine.call("alone", "serve", "--port", "0", "--address", "local")
    assert done.returncode != 0
    assert "one service a home" in done.stderr
    assert machine.file("alone") == before
    home = str(machine.home("alone"))

    def keepers() -> list[int]:
        processes = psutil.process_iter(["cmdline"])
        return [each.pid for each in processes if home in (each.info["cmdline"] or ())]

    eventually(lambda: not keepers())


def test_the_cluster_that_ray_start_left_is_joined_and_found_again(
    machine: Machine, left: str, private: str
) -> None:
    assert machine.left.read_text().strip() == left
    started = machine.json("first", "serve", "--port", "0")
    assert (started["cluster"], started["address"]) == ("running", left)
    written = machine.file("first")
    assert written is not None
    try:
        # Where `ray start` was called again meanwhile, the home's own still comes first.
        machine.left.write_text(private)
        again = machine.json("first", "serve", "--port", "0")
        assert (again["already_running"], again["address"]) == (True, left)
        machine.left.write_text(left)

        # What a file had lost is written again.
        for lost in ({**written, "url": None, "cluster_address": private}, {}):
            (machine.home("first") / "service.json").write_text(json.dumps(lost))
            again = machine.json("first", "serve", "--address", left)
            assert (again["already_running"], again["url"]) == (True, started["url"])
            repaired = machine.file("first")
            assert repaired is not None
            del repaired["started"], repaired["cluster"]
            assert repaired == {key: written[key] for key in repaired}
        assert machine.json("first", "status")["ready"]

        # Another home sees whose it is, and neither writes it down nor stops it.
        other = machine.call("second", "serve", "--port", "1")
        assert "already running" in other.stdout
        assert "its settings and ignores --port" in other.stderr
        assert f"STAGESCOPE_HOME={machine.home('first')} stagescope status" in other.stdout
        assert machine.file("second") is None
        refused = machine.call("second", "stop")
        assert refused.returncode != 0
        assert f"STAGESCOPE_HOME={machine.home('first')} stagescope stop" in refused.stderr
        assert f"--address {left}" in refused.stderr
        assert machine.json("first", "status")["ready"]
    finally:
        machine.left.write_text(left)
        assert machine.json("first", "stop") == {"stopped": True}
    assert machine.actors(left) == "[]"


def test_another_homes_service_is_stopped_by_its_address(machine: Machine, left: str) -> None:
    machine.json("third", "serve", "--port", "0", "--address", left)
    assert machine.json("second", "stop", "--address", left) == {"stopped": True}
    assert machine.actors(left) == "[]"
    assert machine.json("third", "stop") == {"stopped": False}
    assert machine.file("third") is None
