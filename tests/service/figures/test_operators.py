"""Operators in execution order, and two dumps against each other: dumps that msprobe made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from tests.support.api import Rank, Service, service
from tests.support.dumps import capture, dumped
from tests.support.runs.drawn import layout_of
from tests.support.small_decoder import small_decoder

from stagescope_service.compare.operators.divergence import difference_curve
from stagescope_service.figure_style import traces
from stagescope_service.figures import operators
from stagescope_service.views.models.bodies import SideFields


@pytest.fixture(scope="module")
def dumps_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Step 5: rank 1 has a NaN. Step 6: rank 1 was changed in a layer."""
    root = tmp_path_factory.mktemp("dumps")
    broken, changed = small_decoder(), small_decoder()
    with torch.no_grad():
        broken.get_parameter("blocks.1.down.weight")[3, 5] = float("nan")
        changed.get_parameter("blocks.0.up.weight").mul_(1.5)
    models = {"plain": small_decoder(), "nan": broken, "changed": changed}
    files = {name: capture(root / name, model, level="mix") for name, model in models.items()}
    with service(tmp_path_factory.mktemp("home")) as running:
        ranks = [Rank(running, rank=0), Rank(running, rank=1)]
        for step, other in ((5, "nan"), (6, "changed")):
            dumped(running, ranks[0], files["plain"], step)
            dumped(running, ranks[1], files[other], step)
        for stage in ("weight_sync", "actor_compute_log_prob"):
            dumped(running, ranks[0], files["plain"], 7, part=stage, stage=stage)
        yield running


def info(running: Service, step: int, **filters: object) -> operators.OperatorsInfo:
    deps = running.app.state.deps
    return operators.info(deps, deps.finder.step("r", None, step), filters)  # type: ignore[arg-type]


def test_the_dump_with_the_first_non_finite_result_is_drawn(dumps_service: Service) -> None:
    found = info(dumps_service, 5)
    assert found.table is not None
    assert (found.table.role, found.table.rank) == ("actor", 1)
    earliest = dumps_service.get("/steps/5/operators/non-finite")["earliest"]
    assert found.first is not None
    assert (found.first.order, found.first.name) == (earliest["order"], earliest["name"])
    assert found.certain
    assert all(p.non_finite is None for p in found.points if p.order < found.first.order)


def test_without_a_finding_a_pass_is_drawn_and_no_weight_sync(dumps_service: Service) -> None:
    found = info(dumps_service, 7)
    assert found.table is not None
    assert found.table.stage == "actor_compute_log_prob"
    chosen = info(dumps_service, 7, stage="weight_sync")
    assert chosen.table is not None
    assert chosen.table.stage == "weight_sync"


def test_each_result_has_its_largest_magnitude(dumps_service: Service) -> None:
    found = info(dumps_service, 5, rank=0)
    rows = dumps_service.get("/steps/5/operators", rank=0, limit=1000)["rows"]
    results = [row for row in rows if row["section"] in ("output", "grad")]
    assert (found.results, found.non_finite, found.first) == (len(results), 0, None)
    by_hand = sorted(
        (row["order"], max(abs(row["min"]), abs(row["max"])))
        for row in results
        if isinstance(row["min"], float)
    )
    drawn = sorted((p.order, p.largest) for p in found.points if p.largest is not None)
    assert [order for order, _ in drawn] == [order for order, _ in by_hand]
    assert [value for _, value in drawn] == pytest.approx([value for _, value in by_hand])


def test_the_figure_marks_the_first(dumps_service: Service) -> None:
    found = info(dumps_service, 5)
    drawn = operators.figure(found)
    assert found.first is not None
    (line,) = layout_of(drawn).shapes
    assert line.x0 == found.first.order
    assert "first not finite" in layout_of(drawn).annotations[0].text
    assert layout_of(drawn).xaxis.title.text == "call, in execution order"
    bad = next(trace for trace in traces(drawn) if trace.name == "not finite")
    assert len(bad.x) == found.non_finite > 3
    assert "not finite" in layout_of(drawn).yaxis.ticktext


def test_no_label_lies_over_another_or_over_a_point() -> None:
    """The magnitudes span 42 powers of ten; the name is longer than a narrow page is wide."""
    name = "Module.model.layers.1.self_attention.output_projection.down_proj.Linear.forward.0"
    values = [1e-4, 0.0, 1.0, 1e19, 1e38, None]
    points = tuple(
        operators.OperatorPoint(at, name, "forward", None, value, None if value else "nan")
        for at, value in enumerate(values)
    )
    table = operators.OperatorsInfo(
        "r", 1, 5, None, points, len(points), 2, points[-1], True, None, None
    )
    layout = layout_of(operators.figure(table))
    low, high = layout.yaxis.range
    heights = [(math.log10(value) - low) / (high - low) for value in layout.yaxis.tickvals]
    assert layout.yaxis.ticktext[-1] == "not finite"
    assert min(b - a for a, b in itertools.pairwise(sorted(heights))) > 0.05  # 14 of 280 pixels
    (box,) = layout.annotations
    assert box.y < min(heights)  # below the lowest point
    assert max(map(len, box.text.split("<br>"))) <= 34


def test_the_difference_along_the_order_is_that_of_the_comparison(dumps_service: Service) -> None:
    deps = dumps_service.app.state.deps
    a, b = SideFields(step=6, rank=0), SideFields(rank=1)
    found = operators.divergence_info(deps, a, b)
    body = {"a": {"step": 6, "rank": 0}, "b": {"rank": 1}, "limit": 1000}
    answer = dumps_service.read.post("/operators/divergence", json=body).json()
    assert (found.compared, found.differing) == (answer["compared"], sum(answer["counts"].values()))
    assert found.first is not None
    assert found.first.name == answer["first"]["a"]["name"]
    assert found.first.relative == pytest.approx(answer["first"]["relative"])
    differing = {
        (row["a"]["order"], row["section"], round(row["relative"], 12)) for row in answer["rows"]
    }
    assert {(p.order, p.section, round(p.relative, 12)) for p in found.points if p.verdict} == (
        differing
    )
    drawn = operators.divergence_figure(found)
    assert {trace.name for trace in traces(drawn)} == {
        "within the threshold", "differs", "threshold",
    }  # fmt: skip


def test_equal_dumps_say_that_nothing_differs(dumps_service: Service) -> None:
    answer = dumps_service.get("/figures/operator-divergence", step=6, rank=0, b_step=5)
    assert "differs beyond its threshold" in answer["note"]
    assert answer["title"] == "r@1:6 actor 0, actor_update against r@1:5 actor 0, actor_update"


def test_of_many_rows_every_largest_and_first_stays(dumps_service: Service) -> None:
    deps = dumps_service.app.state.deps
    paths = []
    for rank in (0, 1):
        row = next(row for row in deps.catalogue.operators(1, 6) if row["rank"] == rank)
        paths.append(deps.operator_files.path(row))
    every = difference_curve(*paths, points=10_000)
    few = difference_curve(*paths, points=10)
    assert len(few["order"]) <= 20 < len(every["order"]) == every["compared"]
    assert max(few["relative"]) == max(every["relative"])
    first, shown = every["first"], few["first"]
    assert first is not None
    assert shown is not None
    assert (few["order"][shown], few["section"][shown]) == (
        every["order"][first], every["section"][first],
    )  # fmt: skip
    assert not any(map(math.isnan, few["relative"]))


def test_a_step_without_a_dump_says_so(dumps_service: Service) -> None:
    Rank(dumps_service, rank=0, run="none", key="n").stage("actor_update", 1)
    answer = dumps_service.get("/figures/operators", run="none", step=1)
    assert answer["figure"]["data"] == []
    assert answer["note"] == "step 1 of run none has no operators"
