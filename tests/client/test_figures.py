"""Figures in a notebook: from the real service, as plotly's, and as small pictures in a table."""

from __future__ import annotations

import builtins
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import plotly.graph_objects as go
import pytest
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke
from tests.support.runs.drawn import LOG_PROB, layout_of, rounds_payload
from tests.support.stores import eventually

from stagescope import Session, figures
from stagescope_service.figure_style import traces
from stagescope_wire.errors import InvalidInput, MissingExtra, NotFound
from stagescope_wire.render_html import html_bars


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Steps 1 to 5 on two ranks, with a reward; step 6 has begun."""
    with service(tmp_path_factory.mktemp("home")) as running:
        ranks = [Rank(running, rank=rank) for rank in (0, 1)]
        for step in range(1, 6):
            for at, rank in enumerate(ranks):
                handed = rounds_payload(2, 3, 16, seed=10 * step + at, first_sample=2 * at)
                rank.stage(LOG_PROB, step, handed, scalars={"reward": step / 10})
        for rank in ranks:
            rank.begin("rollout_generate", 6)
        yield running


def test_a_metric_over_the_steps(session: Session) -> None:
    figure = session.plot("rollout_corr/k3_kl", "reward", from_step=2, to_step=4)
    assert isinstance(figure, go.Figure)
    line = next(trace for trace in traces(figure) if trace.name == "value")
    series = session.series("rollout_corr/k3_kl", from_step=2, to_step=4)
    assert list(line.x) == [2, 3, 4]
    assert list(line.y) == pytest.approx(list(series["value"]))
    assert layout_of(figure).title.text.startswith("Over the steps of r")
    with pytest.raises(NotFound, match="no metric"):
        session.plot("rollout_corr/k3kl")


def test_the_terminal_says_by_what_the_mismatch_differs(real: Service) -> None:
    assert real.tokens is not None
    env = {"STAGESCOPE_URL": real.server.url, "STAGESCOPE_TOKEN": real.tokens.read}
    done = invoke("anatomy", "5", "--by", "position", "--json", env=env)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["by"], answer["note"]) == ("position", None)
    labels = [row["label"] for row in answer["rows"]]
    assert labels[:3] == ["0", "1", "2-3"]
    shown = invoke("anatomy", "5", "--by", "position", env=env)
    assert shown.exit_code == 0, shown.output
    assert all(label in shown.output for label in labels)


def test_the_rounds_and_ranks_of_a_step_are_drawn(session: Session) -> None:
    step = session.step(5)
    rounds = step.rounds()
    mean = next(trace for trace in traces(rounds.plot(compare=1)) if trace.name == "mean")
    assert list(mean.y) == pytest.approx(list(rounds["abs_diff_mean"]))
    (heat,) = traces(step.ranks().plot(metric="rollout_corr/k3_kl"))
    assert len(heat.y) == 2
    assert traces(step.heatmap())[0].type == "heatmap"
    assert {trace.name for trace in traces(step.timeline())} >= {LOG_PROB}
    assert "ratios" in layout_of(step.distribution("ratio")).title.text
    assert "old against rollout" in layout_of(step.density()).title.text
    anatomy = step.anatomy("end")
    assert "last of the sample" in list(anatomy["label"])
    assert layout_of(anatomy.plot()).title.text.startswith("Mismatch of step 5 by end")


def test_a_slice_has_no_figure(session: Session) -> None:
    with pytest.raises(InvalidInput, match="of a slice \\(rank 1\\)"):
        session.step(5).rounds(rank=1).plot()
    with pytest.raises(InvalidInput, match="by turn"):
        session.step(5).rounds(by="turn").plot()


def test_the_note_stands_below_the_title(session: Session) -> None:
    figure = session.step(6).figure("rounds")
    title, note = layout_of(figure).title.text.split("<br>", 1)
    assert title == "Rounds of step 6"
    assert "no numbers" in note
    assert layout_of(figure).margin.t > 40


def test_a_colour_bar_stands_below_the_title(session: Session) -> None:
    figure = session.step(5).heatmap()
    from_top = (1 - figure.to_plotly_json()["data"][0]["colorbar"]["y"]) * layout_of(figure).height
    assert from_top > 2 * layout_of(figure).title.font.size  # pixels


def test_figures_are_listed_and_unknown_ones_are_not_found(session: Session) -> None:
    listed = session.figures()
    assert {"overview", "rounds", "timeline"} <= set(listed["name"])
    with pytest.raises(NotFound):
        session.figure("nothing")


def test_the_trace_is_a_file(session: Session, tmp_path: Path) -> None:
    path = session.step(5).save_trace(tmp_path / "step5.json")
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {LOG_PROB}


def test_without_plotly_the_error_says_what_to_install(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def refuse(name: str, *rest: Any) -> ModuleType:
        if name.partition(".")[0] == "plotly":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return imported(name, *rest)

    for name in [name for name in sys.modules if name.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr(importlib, "import_module", refuse)
    for draw in (session.plot, session.step(5).timeline, session.step(5).rounds().plot):
        with pytest.raises(MissingExtra, match=r"\[notebook\]"):
            draw()
    assert "abs_diff_mean" in session.step(5).rounds()._repr_html_()  # a table needs none


def test_a_small_picture_stands_above_the_rows(session: Session) -> None:
    rounds = session.step(5).rounds()
    page = rounds._repr_html_()
    assert page.startswith("<svg ")
    assert page.count("<rect") == len(rounds) == 3
    assert "<script" not in page
    assert "<svg" not in repr(rounds)
    assert "<svg" not in session.step(5).scalars()._repr_html_()


def test_bars_are_as_high_as_their_values() -> None:
    picture = html_bars(["a", "<b>", "c", "d"], [2.0, 1.0, math.nan, None], "x")
    heights = [float(part.split('"')[0]) for part in picture.split('height="')[2:]]
    assert heights == [48.0, 24.0, 0.0, 0.0]
    assert "&lt;b&gt;: 1" in picture
    assert "c: nan" in picture
    assert "currentColor" in picture


# --- a live cell --------------------------------------------------------------------------------
def test_a_live_cell_follows_the_run(session: Session, real: Service) -> None:
    pytest.importorskip("anywidget")
    live = session.watch("reward", run="r", seconds=0.05)
    try:
        assert last_step(live) == 6
        assert live.running
        assert not live.update()
        Rank(real, rank=0, incarnation="later").stage("actor_update", 7, scalars={"reward": 1.0})
        eventually(lambda: last_step(live) == 7)
        assert live.error is None
        assert "jupyter.widget-view" in str(live._repr_mimebundle_())
    finally:
        live.stop()
    assert not live.running
    assert "stopped" in repr(live)


def last_step(live: figures.Watch) -> int:
    lines = [trace for trace in traces(live.widget) if trace.name == "value"]
    return max((max(line.x) for line in lines), default=0)  # none while it is redrawn


def test_a_live_cell_without_its_library_says_what_to_install(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(figure: object) -> None:
        raise ImportError("Please install anywidget")

    monkeypatch.setattr(go, "FigureWidget", refuse)
    with pytest.raises(MissingExtra, match="anywidget"):
        session.watch("reward")
    with pytest.raises(InvalidInput, match="positive"):
        session.watch("reward", seconds=0.0)
