"""What a notebook shows: the same summary as the text, units, and what can be completed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from stagescope.answers import KEY_METRICS, Metrics, Record, Status
from stagescope.capture_requests import CaptureRequests
from stagescope.operators import Stack
from stagescope.progress import CaptureProgress
from stagescope.step import Step
from stagescope.table import Table
from stagescope_wire.captures import CAPTURE_FIELDS, SHORTHANDS

WALL = 1_795_320_000.0


def metrics() -> Metrics:
    names = [*KEY_METRICS, *(f"per_round/round_{n}_abs_diff_mean" for n in range(75))]
    about = {"run": "r", "step": 5, "complete": "complete", "comparable": "comparable"}
    return Metrics({name: float(at) for at, name in enumerate(reversed(names))}, about)


def test_the_ten_that_matter_come_first_and_the_rest_is_folded() -> None:
    text, page = repr(metrics()), metrics()._repr_html_()
    assert len(text.splitlines()) < 20
    assert "... 75 more" in text
    shown, folded = page.split("<details>")
    assert shown.count("<tr>") == len(KEY_METRICS) + 1
    assert shown.index("rollout_corr/k3_kl") < shown.index("counts/tokens")
    assert ">nat<" in shown
    assert ">tokens<" in shown
    assert "75 more metrics" in folded
    assert folded.count("<tr>") == 76
    assert "round_74_abs_diff_mean" in folded


def test_the_cause_of_streams_that_cannot_be_compared_is_an_attribute() -> None:
    assert metrics().cause is None
    assert Metrics({}, {"comparable": "suspect", "cause": "shifted"}).cause == "shifted"


def test_a_few_metrics_are_all_shown() -> None:
    metrics_ = Metrics({"per_round/total_rounds": 2.0}, {"run": "r"})
    assert "per_round/total_rounds" in repr(metrics_)
    assert "details" not in metrics_._repr_html_()


def progress() -> CaptureProgress:
    agreement = {"start": 8, "round_trip": 0.05, "without": [], "missed_steps": [],
                 "estimates": []}  # fmt: skip
    rank = {"role": "actor", "rank": 0, "acknowledged": True, "there": True, "last_wall": WALL}
    step = {"step": 8, "state": "complete", "collected": 1, "waiting": [], "gaps": []}
    return CaptureProgress({
        "capture_id": "3f0c", "state": "complete", "reason": None, "agreement": agreement,
        "ranks": [rank], "steps": [step], "dumps": [], "created_wall": WALL,
        "order": {"config": {"task": "statistics"}, "config_path": None, "keep": []},
    })  # fmt: skip


def test_a_live_capture_names_the_ranks_that_it_waits_for() -> None:
    done = progress()
    ranks = [{**done["ranks"][0], "acknowledged": False}]
    live = CaptureProgress({**done, "state": "agreed", "ranks": ranks})
    assert live.lines()[:2] == [
        "0 of 1 rank has acknowledged the agreed step; waiting for actor 0",
        "starts at step 8 (agreed in 0.05 s)",
    ]
    assert CaptureProgress({**done, "ranks": ranks}).lines()[0].endswith("step; not actor 0")


def status() -> Status:
    known = {"pid": 7, "started": WALL, "wall": WALL, "events_taken": 12, "live_processes": 2,
             "revision": 1, "keeping": {"reason": None, "bytes": 3_000_000}}  # fmt: skip
    fields = {"ready": True, "reason": None, "version": "0.1.0", "wall": WALL, "data_dir": "/d/e",
              "catalogue_bytes": 2_000_000, "coordinator": known}  # fmt: skip
    return Status(fields, title="stagescope at http://x")


def stack() -> Stack:
    return Stack({"frames": ["File a.py, line 3, in f,\n x = 1/0"], "stack_id": "1"}, title="stack")


@pytest.mark.parametrize("answer", [progress(), status(), stack()], ids=lambda a: type(a).__name__)
def test_html_is_the_text_and_every_field_folded(answer: Record) -> None:
    page = answer._repr_html_()
    summary, folded = page.split("<details>")
    for line in answer.lines(width=110):
        assert line.split("<")[0] in summary
    for name in answer:
        assert name in folded
    assert "1.79532e+09" not in page
    assert "1.79532e+09" not in repr(answer)


def test_times_and_sizes_have_their_units() -> None:
    record = Record({"created_wall": WALL, "bytes": 3_000_000, "seconds": 2.5, "a": {"wall": WALL}})
    page = record._repr_html_()
    assert page.count("2026-11-22") == 2
    assert "3 MB" in page
    assert "2.5 s" in page
    assert "2.0 MB" in repr(status()) or "2 MB" in repr(status())
    table = Table({"created_wall": [WALL]})
    assert "white-space:nowrap" in table._repr_html_()


def test_names_complete_in_a_notebook() -> None:
    updates: list[tuple[Any, str]] = [
        (metrics(), "rollout_corr/k3_kl"), (status(), "coordinator"), (Table({"k": [1]}), "k"),
    ]  # fmt: skip
    for answer, name in updates:
        assert name in answer._ipython_key_completions_()


def test_signatures_name_what_can_be_given() -> None:
    for method in (CaptureRequests.capture, Step.stack):
        kinds = {one.kind for one in inspect.signature(method).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    given = set(inspect.signature(CaptureRequests.capture).parameters) - {"self"}
    assert given == {*CAPTURE_FIELDS, *SHORTHANDS}
