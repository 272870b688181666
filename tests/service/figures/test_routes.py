"""The list of figures, and what their answers have in common."""

from __future__ import annotations

import json

import plotly.graph_objects as go
import pytest
from tests.support.api import Service
from tests.support.runs.drawn import layout_of

from stagescope_service.figure_style import traces

NAMES = {
    "anatomy", "canary", "comparison", "density", "distribution", "offenders",
    "operator-divergence", "operators", "overview", "rank-rounds", "rank-steps", "rounds",
    "routing", "timeline",
}  # fmt: skip
OF_STEP = {
    "anatomy", "density", "distribution", "operators", "rank-rounds", "rounds", "routing",
    "timeline",
}  # fmt: skip


def test_the_list_names_every_figure_with_its_parameters(trained: Service) -> None:
    rows = {row["name"]: row for row in trained.get("/figures")["rows"]}
    assert set(rows) >= NAMES
    parameters = {p["name"]: p for p in rows["overview"]["parameters"]}
    assert set(parameters) == {"run", "attempt", "metric", "from", "to", "superseded", "smooth"}
    assert parameters["metric"]["repeatable"]
    assert not parameters["run"]["repeatable"]
    of = next(p for p in rows["distribution"]["parameters"] if p["name"] == "of")
    assert of["values"] == ["abs", "ratio"]
    required = [p["name"] for p in rows["operator-divergence"]["parameters"] if p["required"]]
    assert required == ["step"]
    for name in NAMES - {"operator-divergence"}:
        assert not [p["name"] for p in rows[name]["parameters"] if p["required"]]


@pytest.mark.parametrize(
    "name", sorted(NAMES - {"canary", "operator-divergence", "operators", "routing"})
)
def test_each_is_a_figure_of_plotly_on_a_clear_background(trained: Service, name: str) -> None:
    query: dict[str, object] = {"run": "r", **({"step": 7} if name in OF_STEP else {})}
    answer = trained.get(f"/figures/{name}", **query)
    assert (answer["name"], answer["run"]) == (name, "r")
    assert answer["step"] == query.get("step")
    assert answer["title"]
    drawn = go.Figure(answer["figure"])
    assert layout_of(drawn).paper_bgcolor == layout_of(drawn).plot_bgcolor == "rgba(0,0,0,0)"
    assert layout_of(drawn).title.text is None
    assert len(traces(drawn)) > 0
    for axis in (*drawn.select_xaxes(), *drawn.select_yaxes()):
        assert axis.title.text is not None


def test_arrays_are_plain_lists(trained: Service) -> None:
    """Any client reads them: no base64, no NaN, which is no JSON."""
    asked = {"run": "r", "metric": "rollout_corr/k3_kl"}
    text = trained.read.get("/figures/overview", params=asked).text
    assert "bdata" not in text
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    y = next(t["y"] for t in found["figure"]["data"] if t.get("name") == "attempt 1")
    assert y[2] is None


def test_a_metric_may_be_given_several_times_and_a_run_may_not(trained: Service) -> None:
    url = "/figures/overview?run=r&metric=loss&metric=reward"
    answer = trained.read.get(url)
    texts = [text["text"] for text in answer.json()["figure"]["layout"]["annotations"]]
    assert texts[:2] == ["<b>loss</b>", "<b>reward</b>"]
    twice = trained.read.get("/figures/overview?run=r&run=r")
    assert twice.status_code == 422
    assert "given twice" in twice.json()["wrong"]


def test_texts_of_others_are_no_markup(trained: Service) -> None:
    """A name may hold what plotly would take for a link."""
    from tests.support.api import Rank

    evil = "<a href='http://x'>y</a>"
    Rank(trained, run="evil", key="e", world_size=1).stage("actor_update", 1, scalars={evil: 1.0})
    Rank(trained, run="evil", key="e", world_size=1, incarnation="again").begin("actor_update", 2)
    answer = trained.get("/figures/overview", run="evil")
    assert "<a" not in json.dumps(answer["figure"])
