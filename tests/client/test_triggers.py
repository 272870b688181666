"""Triggers by session and command line, on the real API and its store."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.api import Rank, Service, service
from tests.support.chat_services import SECRET, TOKEN, chat_service
from tests.support.command_line import ask
from tests.support.measure import payload
from tests.support.stores import rows_of

import stagescope
from stagescope import Session
from stagescope_service.store.contract import Put
from stagescope_wire.errors import Forbidden, InvalidInput, InvalidPlan, NotFound
from stagescope_wire.nonfinite import Json

STAGE = "actor_compute_log_prob"
RULES = """
rules:
  - name: mean
    metric: logprob_abs_diff/mean
    when: {">": 0.5}
    cooldown: 0
    actions: {finding: {}, webhook: "https://hooks.example.com/SECRET", capture: {}}
runs:
  r: {capture: auto, budget: {captures: 2, bytes: 1000, share: 0.1}}
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run `r`: steps 1 to 5, of which 3 is far off and 4 has a NaN."""
    with service(tmp_path_factory.mktemp("home")) as running:
        rank = Rank(running, world_size=1)
        for step in range(1, 6):
            handed = payload(seed=step, noise=1.0 if step == 3 else 0.001)
            if step == 4:
                handed["tensors"]["old_log_probs"][2][1, 9] = math.nan
            rank.stage(STAGE, step, handed)
        rank.begin("actor_update", 6)
        yield running


def test_the_defaults_are_tried_on_stored_steps(session: Session) -> None:
    assert "verl's own line" in session.default_triggers()
    assert ask("triggers", "--defaults").stdout == session.default_triggers()
    tried = session.test_triggers()
    assert tried.about["steps"] == 5
    rows = {(row["step"], row["rule"]): row for row in tried}
    assert set(rows) == {
        (3, "probs_diff_mean"), (3, "pearson"), (4, "non_finite_log_probs"),
    }  # fmt: skip
    row = rows[4, "non_finite_log_probs"]
    assert (row["role"], row["rank"], row["round"], row["value"]) == ("actor", 0, 1, 1.0)
    assert row["evidence"]["token"]["position"] == 9
    assert not row["fired_live"]
    assert len(session.test_triggers("r", steps=2)) == 1
    with pytest.raises(NotFound, match="no run 'other'"):
        session.test_triggers("other")
    with pytest.raises(InvalidInput, match="steps are 0"):
        session.test_triggers(steps=0)
    text = ask("triggers", "test")
    assert text.exit_code == 0, text.output
    assert "non_finite_log_probs" in text.stdout
    assert "would have fired 3 times in 5 stored steps" in text.stdout
    nothing = session.test_triggers("r", RULES.replace("0.5", "1e9"), steps=2)
    assert nothing.title == "nothing would have fired in 2 stored steps"


def test_rules_are_set_and_shown_without_secrets(session: Session, found: Service) -> None:
    before = session.triggers()
    assert before["name"][0] == "non_finite_log_probs"
    answer = session.set_triggers(RULES)
    assert answer["revision"] == before.about["revision"] + 1
    shown = session.triggers()
    assert shown["name"] == ("mean",)
    assert shown.about["rules"][0]["actions"]["webhook"] == "hooks.example.com"
    for text in (json.dumps(dict(answer)), json.dumps(dict(shown.about)), repr(shown)):
        assert "SECRET" not in text
    budget = shown.about["budgets"][0]
    assert (budget["run"], budget["spent"]["captures"], budget["refusal"]) == ("r", 0, None)
    assert "0 of 2 captures" in repr(shown)
    with pytest.raises(InvalidPlan, match=r"rules\[0\].actions.webhook cannot be called"):
        session.set_triggers({"rules": shown.about["rules"]})
    rule = {**shown.about["rules"][0], "actions": {"finding": {}}}
    session.set_triggers({"rules": [rule], "runs": shown.about["runs"]})
    assert session.triggers()["actions"] == ("finding",)
    with pytest.raises(InvalidPlan, match="one of logprob_abs_diff/mean"):
        session.set_triggers({"rules": [{**rule, "metric": "logprob_abs_dif/mean"}]})
    assert found.tokens is not None
    with stagescope.attach(found.server.url, token=found.tokens.read) as reader:
        assert reader.test_triggers(document=RULES)["rule"] == ("mean",)  # a question
        with pytest.raises(Forbidden, match="may not PUT"):
            reader.set_triggers(RULES)


def test_the_command_line(found: Service, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(RULES)
    said = ask("triggers", "test", "--rules", str(file), "--json")
    answer: Json = json.loads(said.stdout)
    assert [(row["step"], row["rule"]) for row in answer["rows"]] == [(3, "mean")]
    shipped = tmp_path / "shipped.yaml"
    shipped.write_text(ask("triggers", "--defaults").stdout)
    assert ask("triggers", "set", "--rules", str(shipped)).exit_code == 0
    put = ask("triggers", "set", "--rules", str(file))
    assert put.exit_code == 0
    # The rules that ship are replaced: each that is gone is named.
    assert "no longer active: " in put.stderr
    assert "non_finite" in put.stderr
    assert "mean" in put.stdout
    row = {"attempt_id": 1, "step": 3, "rule": "mean", "run": "r", "message": "far off"}
    row |= {"evidence": {"value": 0.9, "attempt": 1}, "actions": {}, "wall": 1.0}
    found.store.submit([Put("firings", row)]).result(30)
    found.store.submit([Put("steps", {"attempt_id": 1, "step": 3, "pinned": True})]).result(30)
    text = ask("triggers")
    assert text.exit_code == 0, text.output
    assert max(map(len, text.stdout.splitlines())) <= 80
    for word in ("mean", "> 0.5", "0.9", "pinned steps: r@1:3", "hooks"):
        assert (word in text.stdout) == (word != "hooks"), text.stdout
    tried = json.loads(ask("triggers", "test", "--json").stdout)
    assert [row["fired_live"] for row in tried["rows"]] == [True]
    fired = json.loads(ask("triggers", "firings", "--json").stdout)["rows"]
    assert (fired[0]["attempt"], fired[0]["message"]) == (1, "far off")
    assert ask("unpin", "3").exit_code == 0
    assert json.loads(ask("triggers", "--json").stdout)["pinned"] == []
    assert ask("triggers", "set").exit_code == 2
    assert ask("triggers", "show", "--rules", str(file)).exit_code == 2
    file.write_text("rules: [{name: x}]")
    wrong = ask("triggers", "test", "--rules", str(file))
    assert wrong.exit_code == 2
    assert "rules[0].metric" in wrong.stderr


def test_a_webhook_is_tried_before_it_is_needed(found: Service, session: Session) -> None:
    with chat_service("dingtalk", signed=True) as chat:
        rules = [
            {"name": "chat", "metric": "counts/tokens", "when": {">": 1e9}},
            {"name": "quiet", "metric": "counts/tokens", "when": {">": 1e9}},
        ]
        rules[0]["actions"] = {"webhook": chat.webhook(signed=True)}
        shown = session.set_triggers({"rules": rules})["rules"][0]["actions"]["webhook"]
        assert shown == {"host": "127.0.0.1", "format": "dingtalk"}
        tested = ask("triggers", "test", "chat")
        assert tested.exit_code == 0, tested.output
        assert "test message of chat: delivered" in tested.stdout
        assert "200, code 0: ok" in tested.stdout
        (message,) = chat.took
        assert message["markdown"]["title"].startswith("stagescope TEST, notice: chat")
        assert "a made-up step: chat has not fired yet" in message["markdown"]["text"]
        chat.answers.append((200, {"errcode": 310000, "errmsg": "keywords not in content"}))
        refused = ask("triggers", "test", "chat", "--json")
        assert refused.exit_code == 1
        answer: Json = json.loads(refused.stdout)
        assert (answer["delivered"], answer["step"], answer["link"]) == (False, None, None)
        assert "keywords not in content" in answer["reason"]
        row = {"attempt_id": 1, "step": 3, "rule": "chat", "run": "r", "message": "far off"}
        row |= {"evidence": {"attempt": 1}, "actions": {}, "wall": 9.0}
        old = {**row, "step": 2, "wall": 8.0, "message": "before"}
        over = {**row, "step": 4, "wall": 10.0, "withdrawn_wall": 11.0}
        found.store.submit([Put("firings", each) for each in (row, old, over)]).result(30)
        (found.settings.home / "service.json").write_text(json.dumps({"url": found.server.url}))
        assert session.test_webhook("chat")["step"] == 3
        assert "far off" in chat.took[-1]["markdown"]["text"]
        assert f"({found.server.url}/#/runs/r/steps/3?attempt=1)" in str(chat.took[-1])
        with pytest.raises(InvalidInput, match="the rule quiet has no webhook"):
            session.test_webhook("quiet")
        with pytest.raises(NotFound, match="no active rule is called 'chta'"):
            session.test_webhook("chta")
        assert ask("triggers", "set", "chat").exit_code == 2
        assert ask("triggers", "test", "chat", "--run", "r").exit_code == 2
        assert found.tokens is not None
        reader = stagescope.attach(found.server.url, token=found.tokens.read)
        with reader, pytest.raises(Forbidden, match="may not POST"):
            reader.test_webhook("chat")
        assert len(chat.took) == 2
    gone = ask("triggers", "test", "chat")
    assert gone.exit_code == 1
    assert "it cannot be reached: ConnectError" in gone.stdout
    audit = [row for row in rows_of(found.store, "audit") if row["action"] == "test_webhook"]
    assert len(audit) == 4
    assert not any(secret in str(audit) for secret in (TOKEN, SECRET))


def test_a_dry_run_tells_attempts_apart_and_misspelt_runs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(tmp_path) as live:
        for key, start in (("a1", 1_000.0), ("a2", 2_000.0)):
            rank = Rank(live, run="countdown", key=key, start=start, world_size=1)
            rank.stage(STAGE, 3, payload(seed=3, noise=1.0))
            rank.begin("actor_update", 4)
        assert live.tokens is not None
        monkeypatch.setenv("STAGESCOPE_URL", live.server.url)
        monkeypatch.setenv("STAGESCOPE_TOKEN", live.tokens.operate)
        file = tmp_path / "rules.yaml"
        file.write_text(RULES.replace("  r:", "  countdwn:"))
        tried = ask("triggers", "test", "--rules", str(file))
        assert tried.exit_code == 0, tried.output
        lines = [line.split()[:3] for line in tried.stdout.splitlines()]
        assert [line for line in lines if line[:1] in (["step"], ["3"])] == [
            ["step", "attempt", "rule"], ["3", "1", "mean"], ["3", "2", "mean"],
        ]  # fmt: skip
        note = "no run 'countdwn' is known (yet) (did you mean countdown?)"
        put = ask("triggers", "set", "--rules", str(file), "--json")
        assert [text[: len(note)] for text in json.loads(put.stdout)["notes"]] == [note]
        with stagescope.attach() as session:
            assert f"note: {note}" in " ".join(repr(session.triggers()).split())
            for name in ("countdown", "count*"):
                answer = session.set_triggers(RULES.replace("  r:", f"  '{name}':"))
                assert answer["notes"] == []
