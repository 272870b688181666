"""The page about hangs in a real browser: the collective that cannot finish."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.service.views.hangs.test_hangs import block
from tests.support.api import Rank, service
from tests.support.browser import axe_problems, chromium
from tests.support.page import visiting
from tests.tools.pictured_scenes import HANGING, hanging

pytest.importorskip("playwright.sync_api")

NAMED = "rank 0 waits in all_reduce #8 of all ranks; rank 1 has not entered it"


@pytest.mark.parametrize("width", [1280, 390])
def test_it_names_the_collective_and_the_line_of_each_rank(tmp_path: Path, width: int) -> None:
    with service(tmp_path / "home") as live, chromium() as browser:
        ranks = (Rank(live, rank=0, host="a"), Rank(live, rank=1, host="b"))
        for rank in ranks:
            rank.stage("actor_update", 1)
            rank.begin("actor_update", 2)
        block(live, ranks)
        with visiting(browser, live, width=width) as visit:
            visit.page.goto(f"{live.server.url}/#/runs/r/hangs")
            visit.log_in(live.tokens.operate)
            visit.wait_until(f"document.querySelector('main').innerText.includes('{NAMED}')")
            found = visit.page.inner_text(".collective")
            assert found.count("f (t.py:1)") == 3  # in the sentence, and of each rank
            assert "not entered" in found
            assert axe_problems(visit.page) == []


def test_the_time_that_a_rank_is_quiet_goes_on(tmp_path: Path) -> None:
    with service(tmp_path / "home", recorded=False) as live, chromium() as browser:
        hanging(live)
        with visiting(browser, live) as visit:
            visit.page.goto(f"{live.server.url}/#/runs/{HANGING}/hangs")
            visit.log_in(live.tokens.operate)
            quiet = "document.querySelector('main time[data-since]')"
            visit.wait_until(f"{quiet}?.textContent.startsWith('3 min')")
            first = visit.page.evaluate(f"{quiet}.textContent")
            visit.wait_until(f"{quiet}.textContent !== '{first}'")
