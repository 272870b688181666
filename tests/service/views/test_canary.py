"""The canary, asked over HTTP, by the session, on the command line, and by the doctor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import plotly.graph_objects as go
import pytest
from tests.service.coordinator.test_canary import arm, model, noisy
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke

import stagescope
from stagescope_service.core.canary.causes import CAUSES
from stagescope_service.figure_style import traces
from stagescope_service.rules.doctor import rulebook
from stagescope_wire.errors import NotFound


def score(
    running: Service,
    run: str,
    versions: Iterable[int] = range(5),
    *,
    source: str = "vllm-0",
    **start: Any,
) -> tuple[Rank, Rank]:
    """Healthy versions of a trainer and an engine."""
    actor = Rank(running, run=run, world_size=1, **start)
    engine = Rank(running, run=run, role="rollout", world_size=1, **start)
    for version in versions:
        scored(actor, engine, version, source=source)
    return actor, engine


def scored(
    actor: Rank,
    engine: Rank,
    version: int,
    serves: int | None = None,
    *,
    has_step: bool = True,
    source: str = "vllm-0",
) -> None:
    """One version; the engine has the weights of the version `serves`."""
    settings = {"dtype": "bfloat16", "temperature": 1.0}
    actor.say(
        "canary", policy_version=version, side="trainer", source="",
        step=version + 1 if has_step else None,
        arms={"fixed": arm(model(version))}, settings=settings, seconds=0.1,
    )  # fmt: skip
    fixed = arm(noisy(model(version if serves is None else serves), version))
    checks = [["tokenizer", True, "BOS 1 on both sides"]]
    engine.say(
        "canary", policy_version=version, side="engine", source=source, settings=settings,
        arms={"fixed": fixed, "again": fixed}, checks=checks, seconds=0.25,
    )  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as made:
        score(made, "good")
        actor, engine = score(made, "stale")
        scored(actor, engine, 5, serves=2)
        actor, engine = score(made, "mended")
        scored(actor, engine, 5, serves=2)
        scored(actor, engine, 6)
        Rank(made, run="other").begin("actor_update", 1)
        yield made


def test_the_versions_of_a_run(running: Service) -> None:
    found = running.get("/canary", run="stale")
    assert (found["run"], found["attempt"], found["next"]) == ("stale", 1, None)
    five, four, *_ = found["rows"]
    assert (five["version"], five["source"], five["verdict"]) == (5, "vllm-0", "differs")
    assert (five["step"], five["causes"], five["seconds"]) == (6, ["old_weights"], 0.25)
    assert (four["verdict"], four["causes"]) == ("agrees", [])
    trainer, twice = five["pairs"]
    assert (trainer["pair"], twice["pair"]) == ("trainer vs engine", "engine twice")
    assert trainer["mean"] > trainer["bound"] > trainer["usual"] > 0
    assert (trainer["bound_of"], trainer["compared_with"]) == ("earlier versions", 5)
    assert (twice["mean"], twice["verdict"]) == (0.0, "agrees")


def test_a_page_after_the_other(running: Service) -> None:
    newest = running.get("/canary", run="stale", limit=2)
    assert [row["version"] for row in newest["rows"]] == [5, 4]
    older = running.get("/canary", run="stale", limit=9, cursor=newest["next"])
    assert [row["version"] for row in older["rows"]] == [3, 2, 1, 0]


def test_the_sequences_of_a_version_the_worst_first(running: Service) -> None:
    found = running.get("/canary/5", run="stale")
    first, *_, last = found["rows"]
    assert (first["pair"], first["verdict"], first["is_odd"]) == (
        "trainer vs engine", "differs", True,
    )  # fmt: skip
    assert abs(first["first"] - first["second"]) == pytest.approx(first["max"])
    assert first["token_id"] == 100 * first["sequence"] + first["position"]
    assert (last["pair"], last["mean"]) == ("engine twice", 0.0)
    assert [row["verdict"] for row in found["engines"]] == ["differs"]
    trainer, engine = found["recorded"]
    assert (trainer["side"], trainer["tokens"], trainer["seconds"]) == ("trainer", 60, 0.1)
    assert (engine["tokens"], engine["settings"]["dtype"]) == (120, "bfloat16")
    assert engine["checks"] == [{"name": "tokenizer", "ok": True, "text": "BOS 1 on both sides"}]
    assert "see /canary" in running.problem(404, "/canary/9", run="stale")["advice"]


def test_a_session_and_a_terminal_show_the_same(
    running: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in running.environment().items():
        monkeypatch.setenv(name, value)
    with stagescope.attach() as session:
        versions = session.canary("stale")
        assert versions.where(verdict="differs")["version"] == (5,)
        assert session.canary("stale", 5)["pair"][0] == "trainer vs engine"
        with pytest.raises(NotFound):
            session.canary("stale", 9)
    shown = invoke("canary", "stale").stdout
    assert ["5", "6", "vllm-0", "old_weights"] in [line.split()[:4] for line in shown.splitlines()]
    assert "engine vllm-0 has the log-probs of version 2" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 80
    assert len(json.loads(invoke("canary", "stale", "5", "--json").stdout)["rows"]) == 6
    assert "`stagescope canary stale 5` for each sequence" in " ".join(
        invoke("findings", "--run", "stale").stdout.split()
    )


def test_the_figure_marks_the_wrong_version(running: Service) -> None:
    answer = running.get("/figures/canary", run="stale")
    trainer, *others = traces(go.Figure(answer["figure"]))
    assert trainer.name == "trainer vs engine"
    assert [each.name for each in others] == ["engine twice", "difference vs before"]
    assert list(trainer.x) == [0, 1, 2, 3, 4, 5]
    assert list(trainer.marker.symbol) == ["circle"] * 5 + ["x"]
    assert "version 5, vllm-0" in trainer.hovertext[5]
    twice, axis = others[0], answer["figure"]["layout"]["yaxis"]
    label_of_zero = axis["ticktext"][axis["tickvals"].index(twice.y[5])]
    assert ("mean |d| 0 nat" in twice.hovertext[5], label_of_zero) == (True, "0")
    empty = running.get("/figures/canary", run="other")
    assert "no canary was scored" in empty["note"]


def test_the_doctor_names_the_engines_weights(running: Service) -> None:
    rows = running.get("/runs/stale/diagnosis")["rows"]
    [found] = [row for row in rows if row["verdict"] == "found"]
    assert (found["rule"], found["since_step"]) == ("engine_weights", 6)
    named = "Engine vllm-0 serves old weights, those of version 2"
    assert found["sentence"] == f"{named}, since step 6, in 1 of 1 version"
    assert found["next"][0].startswith("stagescope canary stale")
    good = {row["rule"]: row for row in running.get("/runs/good/diagnosis", limit=200)["rows"]}
    assert not [row for row in good.values() if row["verdict"] == "found"]
    assert good["engine_weights"]["verdict"] == "not found"
    assert good["prefix_cache_stale"]["verdict"] == "not measured"  # no arm for it was scored
    assert good["prefix_cache_stale"]["against"] == ["no canary compared cached vs uncached"]


def test_the_first_version_that_agrees_ends_a_symptom(running: Service) -> None:
    rows = running.get("/runs/mended/diagnosis")["rows"]
    [found] = [row for row in rows if row["verdict"] == "found"]
    assert (found["since_step"], found["last_step"]) == (6, 6)
    assert "last seen in step 6; the canary of version 6 agrees" in found["against"]


def test_an_engine_that_a_restart_named_otherwise_ends_the_symptom_of_the_old_one(
    running: Service,
) -> None:
    actor, engine = score(running, "renamed")
    scored(actor, engine, 5, serves=2)
    score(running, "renamed", range(6, 14), source="vllm-1", key="a2", start=9_000.0)
    rows = running.get("/runs/renamed/diagnosis")["rows"]
    [found] = [row for row in rows if row["verdict"] == "found"]
    assert (found["rule"], found["last_step"]) == ("engine_weights", 6)


def test_a_run_without_steps_has_versions(running: Service) -> None:
    actor = Rank(running, run="alone", world_size=1)
    engine = Rank(running, run="alone", role="rollout", world_size=1)

    def first() -> str:
        return invoke("doctor", "alone", env=running.environment()).stdout.splitlines()[0]

    for version in range(6):
        scored(actor, engine, version, 2 if version == 5 else None, has_step=False)
    assert first() == (
        "Engine vllm-0 serves old weights, those of version 2, since version 5, in 1 of 1 version"
    )
    scored(actor, engine, 6, has_step=False)
    assert not first().startswith("Engine")


def test_every_cause_is_a_symptom_of_the_doctor() -> None:
    named = [each for rule in rulebook() for each in rule.evidence.parameters.get("causes", ())]
    assert sorted(named) == sorted(CAUSES)
