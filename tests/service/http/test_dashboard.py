"""The Grafana board and the alerts in deploy/: they ask for what /metrics really publishes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.support.api import Rank, service
from tests.support.measure import payload
from tests.support.runs.shown import keep_tensors

from stagescope_service.views.reading import prometheus

DEPLOY: Final = Path(__file__).parents[3] / "deploy"
UNITS: Final = {"short", "none", "s", "bytes"}
KINDS: Final = {"row", "stat", "timeseries", "state-timeline"}
SELECTOR: Final = re.compile(r"\b(stagescope_\w+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    printed = subprocess.check_output([sys.executable, DEPLOY / "grafana/board.py"])
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.fixture(scope="module")
def alerts() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text("utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Metric -> its labels, in the answer about a run to which everything has happened."""
    with service(tmp_path_factory.mktemp("home")) as live:
        keep_tensors(live)
        rank = Rank(live, world_size=1)
        rank.stage("actor_compute_log_prob", 5, payload())
        rank.say("refused", what="record", message="no such tensor", step=5)
        rank.say("dropped", what="payload", count=1, bytes=9, reason="full", step=5)
        path = live.settings.data_path / "dump"
        rank.say(
            "dump", stage="actor_update", step=5, capture_id="c", state="failed", path=str(path)
        )
        rank.begin("actor_update", 6)
        announced = {"tensors": {}, "bytes": 9, "meta": {}}
        rank.say("end", stage="actor_update", step=6, payload=announced)  # and never handed over
        rank.begin("actor_update", 7)
        text = live.read.get("/metrics").text
    families = list(text_string_to_metric_families(text))
    return {
        family.name: {label for sample in family.samples for label in sample.labels}
        for family in families
    }


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (panel for panel in board["panels"] if panel["type"] != "row")


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Expressions with the labels' names of their legends."""
    for panel in panels(board):
        yield from ((target["expr"], target["legendFormat"]) for target in panel["targets"])
    for each in board["annotations"]["list"]:
        yield from ((each["expr"], each["titleFormat"]) for _ in range("expr" in each))
    for variable in board["templating"]["list"]:
        query = variable["query"]
        yield from ((query["query"], "") for _ in range(variable["type"] == "query"))


def check(expression: str, labels: set[str], published: dict[str, set[str]]) -> None:
    """Hold an expression to the names and labels that are published."""
    selectors = SELECTOR.findall(expression)
    assert selectors or "up{" in expression, expression
    known: set[str] = {"instance", "job"}
    for name, matchers in selectors:
        assert name in published, name
        known |= published[name]
        for label, value in re.findall(r'(\w+)=~?"([^"]*)"', matchers):
            assert label in published[name], (name, label)
            values = {
                "metric": set(prometheus.MAIN_METRICS),
                "state": set(prometheus._LABEL_VALUES["state"]),
                "verdict": {"suspect"},
                "run": {"$run"},
            }[label]
            assert set(value.split("|")) <= values, value
    assert labels <= known, (expression, labels)


def test_every_metric_of_the_board_is_published(
    board: dict[str, Any], published: dict[str, set[str]]
) -> None:
    assert {"kind", "run"} <= published["stagescope_lost"]
    assert {"verdict", "cause", "run"} <= published["stagescope_step_comparable"]
    asked = [*expressions(board)]
    assert len(asked) > 35
    for expression, legend in asked:
        check(expression, set(re.findall(r"\{\{(\w+)\}\}", legend)), published)
    named = {name for expression, _ in asked for name, _ in SELECTOR.findall(expression)}
    assert published.keys() - named == set(), "the board leaves metrics out"


def test_the_board_is_as_grafana_documents_it(board: dict[str, Any]) -> None:
    assert re.fullmatch(r"[\w-]{1,40}", board["uid"])
    assert (board["id"], board["schemaVersion"]) == (None, 39)
    assert board["description"]
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert (variables["run"]["multi"], variables["run"]["includeAll"]) == (True, True)
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["run"]["datasource"] == source
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["type"] in KINDS
        assert panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(board):
        assert panel["datasource"] == source
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEF")[
            : len(panel["targets"])
        ]
        assert all(target["datasource"] == source for target in panel["targets"])


def test_alerts_ask_for_what_is_published(
    alerts: list[dict[str, Any]], published: dict[str, set[str]]
) -> None:
    names = [rule["alert"] for rule in alerts]
    assert names == [
        "StagescopeNotReady", "StagescopePayloadsLost", "StagescopeStepSuspect",
        "StagescopeStepsBehind", "StagescopeNoNewStep",
    ]  # fmt: skip
    for rule in alerts:
        texts = " ".join(rule["annotations"].values())
        labels = set(re.findall(r"\$labels\.(\w+)", texts))
        expression = rule["expr"].replace('{job="stagescope"}', "{}")
        check(expression, labels, published)
        assert rule["labels"]["severity"] in ("critical", "warning")
