"""Calls of the API to a coordinator that does not answer in time."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from stagescope.errors import NotReady
from stagescope_service.settings import Settings

pytest.importorskip("ray")
from stagescope_service import api_actor


class Busy:
    """A handle of an actor that takes calls and answers none."""

    def __getattr__(self, name: str) -> Busy:
        return self

    def remote(self, **arguments: Any) -> Busy:
        return self

    def future(self) -> Future[Any]:
        return Future()


def test_an_order_that_was_not_answered_may_still_be_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_actor, "_CALL_SECONDS", 0.0)
    commands = api_actor.CoordinatorCommands(Settings(home=tmp_path))
    commands._handle = Busy()
    with pytest.raises(NotReady, match="did not answer add_capture") as caught:
        asyncio.run(commands.add_capture(spec={}, by="me"))
    assert "may still carry that out" in caught.value.advice
    with pytest.raises(NotReady) as caught:
        asyncio.run(commands.status())
    assert "still" not in caught.value.advice
