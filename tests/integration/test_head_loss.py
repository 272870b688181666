"""Every Ray process of the head is killed, and the head started again with the same Redis.

`make trial-head-loss` does the same with a worker node, trainings on it, and without Redis.
"""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("ray")
from tests.tools.head_loss import OUTSIDE, STEPS, lose_head

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="there is no redis-server")
def test_the_service_is_back_by_itself_with_all_that_it_acknowledged() -> None:
    figures = lose_head(with_redis=True, with_worker=False)
    print(figures)  # noqa: T201 - what was measured
    assert figures.wrong == []
    assert figures.afterwards[OUTSIDE] >= figures.acknowledged[OUTSIDE] + STEPS
