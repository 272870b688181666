"""The list of the cluster's nodes, as threads use it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from stagescope_service.ingest.cluster_state import NodeList


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
