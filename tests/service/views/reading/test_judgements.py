"""Judgements are made in the background, and none of them outlives the service."""

from __future__ import annotations

import threading

from tests.support.stores import eventually

from stagescope_service.views.models.runs import Judgement
from stagescope_service.views.reading.judgements import Judgements

_JUDGEMENT = Judgement(
    healthy=True, current=True, title=None, sentence=None, since_step=None, where=None
)


def test_closing_waits_for_the_one_in_work_and_drops_the_others() -> None:
    judgements = Judgements()
    begun, go_on = threading.Event(), threading.Event()
    made: list[str] = []

    def ask(run: str) -> Judgement | None:
        def judge() -> Judgement:
            begun.set()
            assert go_on.wait(30)
            made.append(run)
            return _JUDGEMENT

        return judgements.of(run, "state", judge)

    assert [ask("first"), ask("second"), ask("third")] == [None, None, None]
    assert begun.wait(30)
    closing = threading.Thread(target=judgements.close)
    closing.start()
    eventually(judgements._closed.is_set)
    go_on.set()
    closing.join(30)
    assert not closing.is_alive()
    assert made == ["first"]
    assert [ask("first"), ask("fourth")] == [_JUDGEMENT, None]
