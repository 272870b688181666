"""A head that does not answer is named after some seconds, and no longer once it answers."""

from __future__ import annotations

import socket

import pytest

from stagescope_service.ingest.cluster_state import FAILED_SECONDS, PENDING_SECONDS, HeadWatch


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
