"""What a reader at a narrow terminal reads: nothing is cut, and every word is right."""

from __future__ import annotations

import math
import re

import pytest

from stagescope import Metrics, Table
from stagescope.answers import Status
from stagescope.comparison_report import Changes
from stagescope.connection import ORDERS, segment, step_segment
from stagescope.findings import Diagnosis, Finding
from stagescope.series import Series
from stagescope.step_answers import Steps, Stuck
from stagescope_service.views.pages import parse_step
from stagescope_wire import render
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import Json
from stagescope_wire.schema import STAGES
from stagescope_wire.sparkline import sparkline


def test_names_and_values_of_the_status_stand_apart() -> None:
    known = {"pending_payloads": 0, "live_processes": 4, "events_taken": 7, "revision": 1}
    lines = Status({"coordinator": known, "version": "1"}).lines()
    assert "payloads to read  0" in lines
    assert "revision" not in lines[1]
    assert "plan revision     1" in lines


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (["numbers"], "1 thing differs"),
        (["numbers", "place", "unknown"], "2 things differ, 1 is unknown"),
        (["unknown", "unknown"], "0 things differ, 2 are unknown"),
    ],
)
def test_one_thing_differs(weights: list[str], text: str) -> None:
    sides = {side: {"run": "r", "attempt": 1} for side in ("a", "b")}
    rows = [{"weight": weight, "area": "x", "name": "y", "a": 1, "b": 2} for weight in weights]
    assert Changes.from_table(Table.from_rows(rows, about=sides)).heading.endswith(f": {text}")


def test_ranks_of_evidence_are_read_as_ranks() -> None:
    evidence = {"affected": [["actor", 1], ["actor", 3], ["critic", 0]], "pairs": [["a", 1, 2]]}
    found = Finding({"kind": "k", "finding_id": "f", "message": "m", "evidence": evidence})
    text = "\n".join(found.lines())
    assert "actor ranks 1, 3, critic rank 0" in text
    assert "a, 1, 2" in text
    assert render.format_value([1, 2]) == "1, 2"


def test_a_wrong_argument_is_named() -> None:
    wrong: Json = {}
    with pytest.raises(
        InvalidInput, match=r"capture_id is \{\}, which is not a name; expected a text"
    ):
        segment(wrong, "capture_id")
    for read in (step_segment, lambda step: parse_step(str(step))):
        for wrong_step in (2**63, 10**18, -1):
            with pytest.raises(InvalidInput, match="from 0 of at most 18 digits"):
                read(wrong_step)
    assert step_segment(10**18 - 1) == str(10**18 - 1)
    assert parse_step("7") == int(step_segment(7)) == 7


@pytest.mark.parametrize("status", ["between stages", "not begun"])
@pytest.mark.parametrize("stage", [None, max(STAGES, key=len)])
def test_stuck_shows_the_process_its_host_and_pid(status: str, stage: str | None) -> None:
    host = "gpu-node-0007.cluster.example.com"
    row = {
        "rank": 3, "status": status, "stage": stage, "seconds": 218.6, "role": "actor", "step": 1,
    }  # fmt: skip
    row |= {"process": "silent", "host": host, "pid": 4_194_304, "usual_seconds": 2.7}
    others = [{**row, "rank": 5, "pid": None}, {**row, "rank": 6, "process": "gone"}]
    stuck = Stuck.from_table(Table.from_rows([row, *others], order=ORDERS["stuck"]))
    lines = stuck.lines(width=80)
    assert max(map(len, lines)) <= 80
    assert f"actor rank 3: process silent, pid 4194304 on {host}" in lines
    assert f"actor rank 5: process silent, pid unknown on {host}" in lines
    assert "actor rank 6: process does not answer, its lease ran out, pid 4194304 on" in lines
    assert "218.6" in "".join(lines)
    assert host in stuck.lines(width=1000)[2]


def test_a_hang_names_the_line_of_each_rank_that_waits() -> None:
    waiting = [{"ranks": [0, 1], "place": "f (t.py:1)"}, {"ranks": [4], "place": None}]
    about = {"collectives": [{"message": "ranks 0-1 and 4 wait", "waiting": waiting}]}
    stuck = Stuck.from_table(Table.from_rows([], about=about))
    assert stuck.lines()[:2] == ["ranks 0-1 and 4 wait", "  ranks 0-1 (waiting): f (t.py:1)"]
    assert "t.py:1" in stuck._repr_html_()


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("verdict", ["suspect", "unknown"])
def test_why_numbers_cannot_be_compared_is_wrapped_not_cut(width: int, verdict: str) -> None:
    text = "the streams agree better when one of them is moved by one token " * 3 + "to the left"
    checks = [{"code": "shifted", "verdict": verdict, "text": text}]
    about = {"complete": "complete", "comparable": verdict, "comparability": checks}
    lines = Metrics({"rollout_corr/kl": 0.5}, about).lines(width=width)
    assert max(map(len, lines)) <= width
    assert f"shifted: {verdict}: {text}" in " ".join(" ".join(lines).split())


def test_a_row_that_can_be_compared_is_marked_where_its_step_cannot() -> None:
    rows = [
        {"rank": 0, "comparable": "comparable", "cause": None, "step_comparable": "suspect"},
        {"rank": 1, "comparable": "suspect", "cause": "shifted", "step_comparable": "suspect"},
    ]
    table = Table.from_rows(rows, about={"comparable": "comparable", "step_comparable": "suspect",
                                         "step_cause": "shifted"})  # fmt: skip
    text, html = "\n".join(table.lines()), table._repr_html_()
    for shown in (text, html):
        assert "comparable*" in shown
        assert "suspect*" not in shown
        assert "step_comparable" not in shown
        words = "* judged by the tokens of this row alone; the whole step is suspect"
        assert words in shown
        assert "the whole step is suspect: shifted" in shown
    assert table["comparable"] == ("comparable", "suspect")
    assert table["step_comparable"] == ("suspect", "suspect")
    healthy = Table.from_rows([{**rows[0], "comparable": "exact", "step_comparable": "comparable"}])
    assert "*" not in "\n".join(healthy.lines())
    about = {"comparable": "comparable", "step_comparable": "suspect", "step_cause": "shifted"}
    metrics = Metrics({"rollout_corr/kl": 0.5}, about)
    assert metrics.step_comparable == "suspect"
    assert "the whole step is suspect: shifted" in "\n".join(metrics.notes())
    assert Metrics({}, {"comparable": "suspect"}).step_comparable == "suspect"


def series(metric: str, kind: str, values: list[float]) -> Series:
    count = len(values)
    return Series.from_answer(
        {
            "metric": metric, "kind": kind, "by": None, "steps": [*range(count)],
            "attempts": [1] * count, "superseded_by": [None] * count,
            "complete": ["complete"] * count, "comparable": ["comparable"] * count,
            "reasons": [None] * count, "earlier_to": None,
            "series": [{"name": "", "values": values}],
        }
    )  # fmt: skip


@pytest.mark.parametrize("steps", [3, 30, 300])
def test_a_sparkline_has_the_width_that_there_is(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagescope_wire.sparkline._can_encode", lambda text: True)
    shown = series("rollout_corr/k3_kl", "metric", [1e-4 * at for at in range(steps)])
    lines = shown.lines(width=80)
    drawn = sum(character in "▁▂▃▄▅▆▇█" for character in lines[0])
    assert drawn >= min(steps, 40)
    assert max(map(len, lines)) <= 80


def test_a_scalars_series_says_what_a_value_is() -> None:
    assert "mean over the ranks and parts" in repr(series("loss", "scalar", [0.5, 0.4]))
    assert "mean over" not in repr(series("rollout_corr/kl", "metric", [0.5, 0.4]))


def test_what_steps_lack_is_not_shortened() -> None:
    gap = (
        "no numbers: no rank handed over both streams: only rollout_log_probs came, of 2 of 2 ranks"
    )
    absent = {"role": "actor", "rank": 2, "stage": "actor_update", "status": "not begun"}
    lacking = {"attempt": 1, "complete": "partial", "gap": gap, "missing": [absent]}
    whole = {"attempt": 1, "complete": "complete", "gap": None, "missing": []}
    rows = [{"step": step, **(whole if step == 2 else lacking)} for step in (3, 2, 1)]
    steps = Steps.from_rows(rows)
    lines = steps.lines(width=60)
    assert max(map(len, lines)) <= 60
    text = " ".join(lines)
    assert f"steps 1, 3: {gap}" in text
    assert "steps 1, 3: missing actor/2 actor_update not begun" in text
    assert ".." not in text


def test_an_open_step_waits_for_ranks_and_misses_none() -> None:
    absent = {"role": "actor", "rank": 2, "stage": "actor_update", "status": "begun"}
    row = {"step": 4, "attempt": 1, "complete": "open", "gap": None, "missing": [absent]}
    shown = "\n".join(Steps.from_rows([row]).lines())
    assert "step 4: open, waiting for actor/2 actor_update begun" in shown
    (note,) = Metrics({}, {"complete": "open", "missing": [absent]}).notes()
    assert note == "complete: open, waiting for actor/2 actor_update begun"


def test_the_line_of_a_series_hides_no_peak_and_shows_gaps_restarts_and_what_is_not_finite() -> (
    None
):
    values: list[float] = [0.0] * 10_000
    values[4_321] = 7.0  # alone among some twenty steps that share its pixel
    values[9_000] = math.nan
    page = series("a/<b>", "metric", values)._repr_html_()
    tops = [float(point.split(",")[1]) for point in re.findall(r"[\d.]+,[\d.]+", page)]
    assert min(tops) == 4.0
    assert max(tops) == 44.0
    assert page.count("<polyline") == 2
    assert page.count("#c62828") == 1
    assert "<b>" not in page.partition("</b>")[2]
    assert "min 0 (0)  max 7 (4321)" in page
    lonely = series("a", "metric", [1.0])._repr_html_()
    assert '<polyline points="4,24.0 4,24.0"/>' in lonely

    restarted = Series.from_answer({
        "metric": "m", "kind": "metric", "by": None, "steps": [1, 2, 2, 3, 4],
        "attempts": [1, 1, 2, 2, 2], "superseded_by": [None, 2, None, None, None],
        "complete": ["complete"] * 5, "comparable": ["comparable"] * 5,
        "begun_again": [[], [], [], ["actor 0"], []],
        "reasons": [None, None, None, "it had no streams", None],
        "earlier_to": None, "series": [{"name": None, "values": [1.0, 2.0, 2.0, None, 5.0]}],
    })  # fmt: skip
    page = restarted._repr_html_()
    assert page.count("stroke-dasharray") == 1
    assert "a dashed line: another attempt" in page
    assert page.count("l3 5h-6z") == 1
    assert page.count("<polyline") == 2
    assert "it had no streams" in page
    assert "value: last 5" in page

    bars, marks, *notes = restarted.lines(width=200)
    assert bars.startswith("value")
    assert marks == " " * len("value  ") + "  |^"
    assert notes[0] == "| begin of attempt 2 at step 2"
    assert not series("a", "metric", [1.0, 2.0]).lines()[1].strip().startswith("|")


def test_each_attempt_of_a_series_has_its_own_part_of_the_line() -> None:
    steps = [1, 1, 2, 2, 3, 4]
    found = Series.from_answer({
        "metric": "m", "kind": "scalar", "by": None, "steps": steps,
        "attempts": [1, 2, 1, 2, 1, 1], "superseded_by": [2, None, 2, None, 2, 2],
        "complete": ["complete"] * 6, "comparable": [None] * 6, "begun_again": [[]] * 6,
        "reasons": [None] * 6, "earlier_to": None, "note": None,
        "series": [{"name": "", "values": [1.0, 5.0, 2.0, 6.0, 3.0, 4.0],
                    "low": [1.0, 5.0, 2.0, 6.0, 3.0, 4.0]}],
    })  # fmt: skip
    assert (found["step"], found["attempt"]) == ((1, 2, 3, 4, 1, 2), (1, 1, 1, 1, 2, 2))
    assert found["value"] == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    assert found.about["series"][0]["low"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    notes = found.notes()
    assert notes[0].startswith("4 steps, 1 to 4, attempts 1, 2 (2 of them more than once)")
    assert "superseded: steps 1-4 of attempt 1, because attempt 2 resumed before them" in notes


def test_a_short_line_shows_a_drop_as_well_as_a_spike() -> None:
    values: list[float | None] = [5.0] * 200
    values[61], values[63], values[150] = 0.0, 9.0, None
    bars = "12345"
    line = sparkline(values, 20, bars=bars, extremes=True)
    assert len(line) == 20
    assert line[6:8] == "15"  # the smallest and the largest of the steps 60 to 79, in their order
    assert set(line[:6] + line[8:]) == {"3"}
    assert sparkline(values, 20, bars=bars)[6] == "5"  # where the drop is lost
    assert sparkline([1.0, math.nan, *[1.0] * 98, None], 10, bars=bars, extremes=True)[:2] == "!!"
    assert sparkline([1.0, None, 2.0], 10, bars=bars, extremes=True) == "1 5"


def test_an_explained_symptom_without_a_first_step_shows_its_evidence() -> None:
    row: dict[str, Json] = {
        "verdict": "found", "last_step": None, "next": [], "against": [], "meaning": "m",
        "record": None, "waits": False,
    }  # fmt: skip
    rows: list[dict[str, Json]] = [
        {**row, "rule": "a", "cause": None, "sentence": "A, since step 4", "since_step": 4,
         "for": []},
        {**row, "rule": "b", "cause": "a", "sentence": "B does not rise", "since_step": None,
         "for": ["b goes from 1 to 1 over 20 steps"]},
        {**row, "rule": "c", "cause": "a", "sentence": "C, since step 5", "since_step": 5,
         "for": ["c"]},
    ]  # fmt: skip
    lines = Diagnosis.from_rows(rows).lines()
    assert "  * B does not rise: b goes from 1 to 1 over 20 steps" in lines
    assert "  * C, since step 5" in lines
