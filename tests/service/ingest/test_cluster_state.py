"""The head of the cluster, named while it does not answer, and its list of nodes."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagescope_service.ingest.cluster_state import (
    FAILED_SECONDS,
    PENDING_SECONDS,
    HeadWatch,
    NodeList,
)


def test_a_head_that_fails_is_named_until_it_answers() -> None:
    head = HeadWatch("10.0.0.1:6379")
    assert head.problem(100.0) == ""
    head.asked(100.0)
    assert head.failed("nobody listens")
    assert head.problem(100.0 + FAILED_SECONDS - 0.1) == ""
    head.asked(103.0)
    assert not head.failed("nobody listens")
    problem = head.problem(106.0)
    assert "the head at 10.0.0.1:6379 has not answered for 6 s (nobody listens)" in problem
    assert "`stagescope serve`" in problem
    head.asked(107.0)
    head.answered()
    assert head.problem(200.0) == ""


def test_a_head_that_takes_the_call_and_does_not_answer_is_named() -> None:
    head = HeadWatch("10.0.0.1:6379")
    head.asked(0.0)
    assert head.problem(PENDING_SECONDS - 0.1) == ""
    assert "the call is not answered" in head.problem(PENDING_SECONDS)


def test_nothing_listens_where_the_head_was() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = HeadWatch(f"127.0.0.1:{server.getsockname()[1]}")
        head.check()
    with pytest.raises(ConnectionRefusedError):
        head.check()


def test_threads_that_come_before_the_first_list_wait_for_it() -> None:
    reading, goes_on, reads = threading.Event(), threading.Event(), []

    def read() -> list[dict[str, object]]:
        reads.append("")
        reading.set()
        assert goes_on.wait(30)
        return [
            {"NodeID": "a", "Alive": True},
            {"NodeID": "b", "Alive": False, "DeathReason": 2, "DeathReasonMessage": "no answer"},
            {"NodeID": "c", "Alive": False, "DeathReason": 1},
        ]

    nodes = NodeList(read)

    def is_alive() -> bool:
        nodes.look()
        return "a" in nodes.alive

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(is_alive) for _ in range(4)]
        assert reading.wait(30)
        goes_on.set()
        assert [each.result() for each in asked] == [True] * 4
    assert len(reads) == 1
    assert nodes.lost == {"b": "no answer"}
    assert not nodes.is_due_for(["a", None])
    nodes.doubt()
    assert nodes.is_due_for(["a"])
