"""Calls of the API to a coordinator: by its socket, by Ray, and to one that does not answer."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from stagescope_service.settings import Settings
from stagescope_wire.errors import Conflict, InvalidPlan, NotReady, StagescopeError, Unreachable
from stagescope_wire.links import Link

pytest.importorskip("ray")
from stagescope_service import api_actor
from stagescope_service.coordinator import control_socket


class Busy:
    """A handle of an actor that takes calls and answers none."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Busy:
        self.called.append(name)
        return self

    def remote(self, **arguments: object) -> Busy:
        return self

    def future(self) -> Future[object]:
        return Future()


def test_a_command_without_an_answer_may_still_be_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_actor, "_CALL_SECONDS", 0.0)
    commands = api_actor.CoordinatorCommands(Settings(home=tmp_path))
    commands._handle = Busy()
    # The client tries again what is not ready, and no order that may be in force.
    with pytest.raises(Unreachable, match="did not answer add_capture") as caught:
        asyncio.run(commands.add_capture(spec={}, by="me"))
    assert "may still do so" in caught.value.advice
    with pytest.raises(NotReady, match="did not answer status"):
        asyncio.run(commands.status())


class Asked:
    """What a coordinator is asked over its socket, each method once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.commands = api_actor.CoordinatorCommands(Settings(home=home))
        self.handle = self.commands._handle = Busy()

    async def serve(self, **methods: control_socket.Method) -> asyncio.Server:
        return await control_socket.serve(self.home, methods)


async def status() -> dict[str, object]:
    return {"live_processes": 3, "lag": math.nan, "said": "a line\nand another ✓" + "x" * 200_000}


async def refuse(**arguments: object) -> dict[str, object]:
    raise InvalidPlan(
        f"no {arguments['spec']}", expected="a capture", advice="look", see=[Link("captures")]
    )


async def fail(**arguments: object) -> dict[str, object]:
    raise KeyError("secret")


async def never(**arguments: object) -> dict[str, object]:
    await asyncio.Event().wait()
    return {}


@pytest.mark.parametrize("folder", ["home", "a" * 90 + "/" + "b" * 90])
def test_the_socket_answers_while_ray_has_its_hands_full(tmp_path: Path, folder: str) -> None:
    home = tmp_path / folder
    home.mkdir(parents=True)

    async def ask() -> None:
        asked = Asked(home)
        async with await asked.serve(status=status, add_capture=refuse, unpin=fail):
            several = await asyncio.gather(*[asked.commands.status() for _ in range(20)])
            assert [said["live_processes"] for said in several] == [3] * 20
            assert math.isnan(several[0]["lag"])
            assert several[0]["said"] == (await status())["said"]
            with pytest.raises(InvalidPlan) as refused:
                await asked.commands.add_capture(spec={"a": 1}, by="me")
            assert (refused.value.wrong, refused.value.expected, refused.value.advice) == (
                "no {'a': 1}", "a capture", "look"
            )  # fmt: skip
            assert refused.value.see == (Link("captures"),)
            with pytest.raises(StagescopeError, match="failed with KeyError") as failed:
                await asked.commands.unpin(attempt_id=1, step=1, by="me")
            assert "secret" not in str(failed.value)

    asyncio.run(ask())


def test_a_command_is_not_repeated_where_the_coordinator_ended_during_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_actor, "_CALL_SECONDS", 0.2)

    async def ask() -> None:
        asked = Asked(tmp_path)

        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.close()

        address = os.fspath(tmp_path / control_socket.FILE)
        async with await asyncio.start_unix_server(leave, address):
            with pytest.raises(Unreachable, match="ended before it answered pin") as caught:
                await asked.commands.pin(attempt_id=1, step=1, by="me")
            assert "may still do so" in caught.value.advice
            assert asked.handle.called == []
            with pytest.raises(NotReady, match="did not answer plan"):  # a question, by Ray
                await asked.commands.plan()
            assert asked.handle.called == ["plan"]

    asyncio.run(ask())


def test_without_a_listener_calls_go_by_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that a dead coordinator left is none; the next one takes its place."""
    monkeypatch.setattr(api_actor, "_CALL_SECONDS", 0.2)

    async def ask() -> None:
        asked = Asked(tmp_path)
        (await asked.serve(status=status)).close()
        with pytest.raises(NotReady, match="did not answer status"):  # by Ray
            await asked.commands.status()
        async with await asked.serve(status=status, drain=never):
            assert (await asked.commands.status())["live_processes"] == 3
            with pytest.raises(NotReady, match="did not answer drain"):
                await asked.commands.drain(run=None, timeout=1.0)

    asyncio.run(ask())


def test_no_service_begins_beside_a_coordinator_that_still_writes(tmp_path: Path) -> None:
    from stagescope_service.serve import _check_none_writes

    settings = Settings(home=tmp_path)
    _check_none_writes(settings)

    async def status() -> dict[str, object]:
        return {"pid": 4711}

    async def ask() -> None:
        async with await control_socket.serve(tmp_path, {"status": status}):
            with pytest.raises(Conflict, match=r"still runs \(pid 4711\)"):
                await asyncio.to_thread(_check_none_writes, settings)

    asyncio.run(ask())
    _check_none_writes(settings)  # the socket of one that ended


def test_a_port_that_its_dying_owner_still_holds_is_waited_for(tmp_path: Path) -> None:
    from stagescope_service.serve import _check_port

    with socket.create_server(("127.0.0.1", 0)) as held:
        settings = Settings(home=tmp_path, port=held.getsockname()[1])
        ends = threading.Timer(0.3, held.close)
        ends.start()
        _check_port(settings)
        ends.join()
