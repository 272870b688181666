"""Two attempts against each other: over the steps, and their kept tensors."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.api import Service
from tests.support.runs.drawn import layout_of, streams

from stagescope_service.figure_style import traces
from stagescope_service.figures import comparison
from stagescope_service.figures.lines import Line
from stagescope_service.views.reading.dependencies import Dependencies, Window
from stagescope_wire.errors import NotFound

MEAN = "logprob_abs_diff/mean"
EVERYTHING: Window = {"first": None, "last": None}


def test_both_attempts_have_their_numbers(deps: Dependencies) -> None:
    found = comparison.info(deps, "r@1", "r@2", [MEAN], EVERYTHING)
    (panel,) = found.panels
    for attempt, lines in ((1, panel.a), (2, panel.b)):
        values = {s: v for line in lines for s, v in zip(line.steps, line.values, strict=True)}
        expected = float(streams(7, attempt).distance.mean())
        assert values[7] == pytest.approx(expected, rel=1e-9)
    drawn = comparison.figure(found)
    assert [trace.name for trace in traces(drawn)] == ["r@1", "r@1", "r@2"]
    assert layout_of(drawn).title.text == "r@1 against r@2"
    assert layout_of(drawn).yaxis.title.text == "nat"


def test_the_newest_attempts_that_have_the_step_are_the_default(
    trained: Service, deps: Dependencies
) -> None:
    assert comparison.newest_attempts(deps, "r", 7) == ("r@1:7", "r@2:7")
    with pytest.raises(NotFound, match="1 attempts with step 9"):
        comparison.newest_attempts(deps, "r", 9)
    answer = trained.get("/figures/comparison", run="r", metric=MEAN)
    assert answer["title"] == "r@1 against r@2"


def test_with_a_step_its_tensors_are_compared(trained: Service) -> None:
    answer = trained.get("/figures/comparison", run="r", step=7)
    assert (answer["run"], answer["attempt"], answer["step"]) == ("r", 1, 7)
    assert answer["note"].startswith("different")
    flow = answer["figure"]["layout"]
    assert flow["yaxis"]["title"]["text"] == "|d| = |A - B|"
    report = trained.post("/comparisons", {"a": "r@1:7", "b": "r@2:7"})
    assert answer["note"].startswith(report["pairs"][0]["verdict"])
    again = trained.get("/figures/comparison", a="r@1:7", b="r@2:7", at=1)
    assert again["title"] != answer["title"]
    # Its result is kept, so that the service answers at once.
    assert trained.problem(404, "/figures/comparison", run="r", step=7, at=99)["expected"]


def test_equal_sides_are_said_to_be_the_same(trained: Service) -> None:
    answer = trained.get("/figures/comparison", a="r@2:7", b="r@2:7")
    assert answer["note"].startswith("same")
    assert answer["figure"]["data"] == []


def test_a_side_alone_is_held_against_the_run(trained: Service) -> None:
    answer = trained.get("/figures/comparison", run="r", a="r@1", metric=MEAN)
    assert answer["title"] == "r@1 against r"


def test_many_steps_are_two_solid_lines_with_a_name_at_their_ends() -> None:
    def side(at: int, steps: int) -> tuple[Line, ...]:
        values = tuple(float(at + (step % 7)) for step in range(steps))
        return (Line(at, superseded=False, steps=tuple(range(steps)), values=values),)

    def drawn(steps: int) -> dict[str, Any]:
        panel = comparison.SidePanel(MEAN, "nat", side(1, steps), side(2, steps), ())
        found = comparison.ComparisonInfo("r@1", "r@2", "r", 1, (panel,), None)
        return {str(trace.name): trace for trace in traces(comparison.figure(found))}

    long = drawn(300)
    assert [*long] == ["A: r@1", "B: r@2", "label A", "label B"]
    one, other = long["A: r@1"], long["B: r@2"]
    assert (one.line.dash, other.line.dash) == ("solid", "solid")
    assert one.line.color != other.line.color
    assert one.line.width < drawn(20)["r@1"].line.width
    for name, line in (("label A", one), ("label B", other)):
        label = long[name]
        assert (label.x[0], label.y[0]) == (line.x[-1], line.y[-1])
        assert label.textfont.color == line.line.color
    assert long["label A"].textposition != long["label B"].textposition  # they do not overlap
    assert [trace.line.dash for trace in drawn(20).values()] == ["solid", "dash"]
