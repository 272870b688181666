"""Prompts over steps, against sums over the tokens that were handed over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.api import Rank, Service, service
from tests.support.measure import Handed
from tests.support.runs.drawn import LOG_PROB, layout_of, rounds_payload

from stagescope_service.figure_style import traces
from stagescope_service.figures import offenders
from stagescope_service.views.reading.dependencies import Dependencies, Window

RUN = "prompts"
STEPS = range(1, 5)
ROWS = 4
ALL = Window(first=None, last=None)


def payload(step: int, rank: int) -> Handed:
    """Rows of the prompts 0 to 7; those of prompt 3 differ five times as much."""
    found = rounds_payload(
        ROWS, 2, 24, seed=10 * step + rank, first_sample=ROWS * rank, noise=[0.01, 0.02],
    )  # fmt: skip
    tensors = found["tensors"]
    p, q = (tensors[name][2] for name in ("old_log_probs", "rollout_log_probs"))
    names = [f"math:{(ROWS * rank + row + step) % 8}" for row in range(ROWS)]
    for row, name in enumerate(names):
        if name == "math:3":
            p[row] = q[row] + 5 * (p[row] - q[row])
    found["strings"]["prompt_hashes"] = names
    return found


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as running:
        for rank in range(2):
            sender = Rank(running, run=RUN, rank=rank, key="p", world_size=2)
            for step in STEPS:
                sender.stage(LOG_PROB, step, payload(step, rank))
            sender.begin(LOG_PROB, STEPS.stop)
        unknown = Rank(running, run="unknown", key="u", world_size=1)
        unknown.stage(LOG_PROB, 1, rounds_payload(ROWS, 2, 24, seed=1))
        unknown.begin(LOG_PROB, 2)
        yield running


@pytest.fixture(scope="module")
def asked(reported: Service) -> Dependencies:
    found: Dependencies = reported.app.state.deps
    return found


def test_samples_without_a_token_hide_no_other(tmp_path: Path) -> None:
    """Their rows come first in the catalogue, and none of them counts."""
    with service(tmp_path / "home") as live:
        sent = rounds_payload(4, 2, 200, seed=1)
        sent["strings"]["prompt_hashes"] = ["a", "a", "b", "b"]
        sent["strings"]["sample_ids"] = ["0", "1", "2", "3"]
        sent["tensors"]["response_mask"][2][:2] = 0
        sent["tensors"]["rewards"] = ("float64", (4,), np.arange(4.0), None)
        rank = Rank(live, run="r", world_size=1)
        rank.stage(LOG_PROB, 1, sent)
        rank.begin(LOG_PROB, 2)
        found = offenders.info(live.app.state.deps, "r", None, ALL)
        tokens = int(sent["tensors"]["response_mask"][2].sum())
        assert [(row.prompt_hash, row.samples, row.tokens) for row in found.rows] == [
            ("b", 2, tokens)
        ]
        rows = live.get("/steps/1/samples", sort="sample_uid")["rows"]
        assert [(row["sample_uid"], row["reward"]) for row in rows] == [("2", 2.0), ("3", 3.0)]


def test_prompts_that_differ_again_and_again_come_first(asked: Dependencies) -> None:
    found = offenders.info(asked, RUN, None, ALL)
    assert found.steps == tuple(STEPS)
    assert found.prompts == 8
    assert found.note == "the streams are suspect in steps 1-4"  # some of their p are above 0
    distances: dict[str, list[npt.NDArray[np.float64]]] = {}
    expected: dict[str, float] = {}
    for step in STEPS:
        rows = []
        for rank in range(2):
            handed = payload(step, rank)
            tensors = handed["tensors"]
            on = tensors["response_mask"][2] == 1
            d = tensors["old_log_probs"][2].astype(float) - tensors["rollout_log_probs"][2]
            names = handed["strings"]["prompt_hashes"]
            rows += [(name, np.abs(d[row][on[row]])) for row, name in enumerate(names)]
        mean = float(np.concatenate([each for _, each in rows]).mean())
        for name, each in rows:
            distances.setdefault(name, []).append(each)
            expected[name] = expected.get(name, 0.0) + mean * len(each)
    for row in found.rows:
        tokens = np.concatenate(distances[row.prompt_hash])
        assert (row.samples, row.tokens) == (len(distances[row.prompt_hash]), len(tokens))
        assert row.mean_abs == pytest.approx(float(tokens.mean()))
        assert row.ratio == pytest.approx(float(tokens.sum()) / expected[row.prompt_hash])
    worst = found.rows[0]
    assert (worst.prompt_hash, worst.above, worst.steps) == ("math:3", 4, tuple(STEPS))
    assert all(row.above == 0 for row in found.rows[1:])
    bar = traces(offenders.figure(found))[0]
    assert bar.y[-1] == "math:3"
    assert bar.x[-1] == worst.ratio
    two = offenders.info(asked, RUN, 1, Window(first=2, last=3))
    assert two.steps == (2, 3)


def test_without_prompts_or_numbers_the_axes_say_so(reported: Service, asked: Dependencies) -> None:
    found = offenders.info(asked, "unknown", None, ALL)
    assert found.note == "which prompt a sample belongs to is not recorded (prompt_hashes)"
    drawn = offenders.figure(found)
    assert not drawn.data
    assert len(layout_of(drawn).annotations) == 1
    assert "both streams" in str(offenders.info(asked, RUN, 1, Window(first=90, last=None)).note)
    answer = reported.get("/figures/offenders", run="unknown")
    assert (answer["step"], answer["note"]) == (None, found.note)
