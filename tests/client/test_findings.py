"""Findings, losses and firings, grouped by the real service and read by client and terminal."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.api import Rank, Service, service
from tests.support.command_line import ask, invoke

import stagescope
from stagescope_service.core.findings import finding
from stagescope_service.store.contract import Put
from stagescope_wire.errors import NotFound
from stagescope_wire.links import Link

STAGE = "actor_update"
OPERATOR = "Module.model.layers.11.mlp.down_proj.Linear.forward.0"
ADVICE = "trust the mismatch of this step only once this is explained"


def put_finding(kind: str, message: str, step: int, **more: object) -> Put:
    keys = {"run": "r", "attempt_id": 1, "wall": 1e9 + step, "stage": STAGE, "step": step}
    return finding(kind, message, **{**keys, **more})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A NaN that lasts from step 10 to 25 on both ranks, the operator, and a warning of step 3."""
    with service(tmp_path_factory.mktemp("home")) as running:
        ranks = [Rank(running, rank=rank) for rank in (0, 1)]
        for step, rank in ((4, 0), (5, 1)):
            reason = f"the buffer is full: {299 + step} MB wait"
            work = {"step": step, "stage": STAGE}
            ranks[rank].say("dropped", what="payload", count=2, bytes=30, reason=reason, **work)
        puts = [
            put_finding(
                "nonfinite_log_probs",
                f"{step} NaN in old, of 96 tokens",
                step,
                severity="error",
                role="actor",
                rank=rank,
                see=[Link("tokens", step, query={"kind": "nonfinite"}, shows="which")],
                evidence={"old_nan": step},
            )
            for step in range(10, 26)
            for rank in (0, 1)
        ]
        named = {"severity": "error", "role": "actor", "rank": 1, "evidence": {"name": OPERATOR}}
        puts.append(put_finding("non_finite_operator", f"{OPERATOR} gave nan", 10, **named))
        puts.append(put_finding("streams_temperature", "0.6 a nat", 3, advice=ADVICE))
        running.store.submit(puts).result(30)
        yield running


def printed(*words: str, width: int = 80) -> str:
    result = ask(*words, width=width)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_repeated_findings_are_grouped(session: stagescope.Session) -> None:
    found = session.findings()
    assert len(found) == 34
    kinds = found.groups["kind"]
    assert kinds == ("non_finite_operator", "nonfinite_log_probs", "streams_temperature")
    lasting = found.groups[1]
    assert lasting["where"] == "steps 10-25, ranks 0-1"
    assert (lasting["findings"], lasting["first_step"], lasting["last_step"]) == (32, 10, 25)
    # The first of them speaks for all: there it began.
    assert (lasting["step"], lasting["rank"], lasting["evidence"]) == (10, 0, {"old_nan": 10})


@pytest.mark.parametrize("width", [50, 80, 200])
def test_a_message_and_its_advice_are_wrapped_not_cut(
    session: stagescope.Session, width: int
) -> None:
    text = printed("findings", width=width)
    assert max(map(len, text.splitlines())) <= max(width, len(OPERATOR) + 2)
    assert ".." not in text
    flat = " ".join(text.split())
    assert OPERATOR in text
    assert ADVICE in flat
    assert "see `stagescope tokens 10 --kind nonfinite --run r` for which" in flat
    assert flat.count("steps 10-25, actor ranks 0-1") == 1


def test_only_some(session: stagescope.Session) -> None:
    assert len(session.findings(only="error").groups) == 2
    assert set(session.findings(only="warning,error")["severity"]) == {"error", "warning"}
    assert session.findings(only="streams_*").groups["kind"] == ("streams_temperature",)
    either = session.findings(only="error,streams_*")
    assert {*either["kind"]} == {
        "non_finite_operator",
        "nonfinite_log_probs",
        "streams_temperature",
    }
    assert len(either) == 34
    assert len(either.groups) == 3
    assert {*session.findings(only="error,none_*")["severity"]} == {"error"}
    assert not len(session.findings(only="info"))
    with pytest.raises(NotFound, match="streams_temperature"):
        session.findings(only="stream")
    assert "non_finite_operator" not in printed("findings", "--only", "warning")


def test_one_finding_by_the_displayed_id(session: stagescope.Session) -> None:
    shown = re.findall(r"^([0-9a-f]{10}) error nonfinite", printed("findings"), re.MULTILINE)
    assert len(shown) == 1
    text = printed("finding", shown[0])
    for words in ("10 NaN in old, of 96", "old_nan  10", "32 findings, steps 10-25", "--kind nonf"):
        assert words in text
    # The first word is no `error:`, which would read as a failure of the command.
    found = session.finding(shown[0])
    assert text.startswith(f"finding {found['finding_id']}: {found['kind']} (severity error)\n")
    assert found["advice"].startswith("see /steps/10/tokens")
    assert [(each["noun"], each["step"]) for each in found["see"]] == [("tokens", 10)]
    assert 'session.step(10, run="' in str(found)
    refused = invoke("finding", "zz")
    assert refused.exit_code == 4


def test_losses_that_differ_in_a_number_are_one(session: stagescope.Session) -> None:
    lost = session.lost()
    assert len(lost) == 2
    (group,) = lost.groups
    assert (group["count"], group["bytes"], group["where"]) == (4, 60, "steps 4-5, ranks 0-1")
    text = printed("lost")
    assert "303 MB wait" in text
    assert text.startswith("lost data, run ")


def test_json_holds_every_row_and_the_groups(session: stagescope.Session) -> None:
    answer = json.loads(printed("findings", "--json", "--limit", "500"))
    assert len(answer["rows"]) == 34
    assert len(answer["groups"]) == 3


def test_a_notebook_shows_the_groups_too(session: stagescope.Session) -> None:
    page = session.findings()._repr_html_()
    assert page.count("steps 10-25") == 1
    assert page.index("down_proj") < page.index("NaN in old, of 96") < page.index("0.6 a nat")
    assert ADVICE in page
    call = "see session.step(10, run='r').tokens(kind='nonfinite')"
    assert call in html.unescape(page).replace('"', "'")


def test_other_errors_are_not_hidden_behind_the_first_one(tmp_path: Path) -> None:
    shape = "rollout_log_probs has shape (4, {}), expected (4, 64) as old_log_probs"
    texts = {
        1: shape.format(40), 2: "response_mask holds 2 at row 0, expected 0 and 1",
        3: "sample_ids names 3 samples, expected 4", 4: shape.format(38),
    }  # fmt: skip
    with service(tmp_path) as running:
        rank = Rank(running)
        rank.begin(STAGE, 1)
        for step, text in texts.items():
            rank.say("refused", what="init", message=text, step=step, stage=STAGE)
        puts = [put_finding("payload_invalid_tensor", text, step) for step, text in texts.items()]
        for step, reached in ((1, "0, 2-5"), (2, "1 and 3"), (3, "7")):
            text = (
                f"sample 'g-{step}' of 0f3a9c{step}b on actor ranks {reached} is off by -0.{step}"
                f" in {step} value{'' if step == 1 else 's'}"
            )
            puts.append(put_finding("off", text, step))
        running.store.submit(puts).result(30)
        assert running.tokens is not None
        with stagescope.attach(running.server.url, token=running.tokens.read) as session:
            found = session.findings()
        where: dict[str, dict[str, str]] = {}
        for group in found.groups:
            where.setdefault(group["kind"], {})[group["message"]] = group["where"]
        expected = {texts[1]: "steps 1, 4", texts[2]: "step 2", texts[3]: "step 3"}
        assert where["payload_invalid_tensor"] == expected
        assert [*where["refused_init"]] == [*expected]
        # Apart from numbers and ids these three say the same.
        [(off, steps)] = where["off"].items()
        assert steps == "steps 1-3"
        assert off.endswith("of 0f3a9c1b on actor ranks 0, 2-5 is off by -0.1 in 1 value")
        text = repr(found)
        assert all(words in " ".join(text.split()) for words in expected)


def test_firings_name_their_run_and_what_became_of_their_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fired(step: int, attempt: int, run: str, actions: object) -> Put:
        row = {"attempt_id": attempt, "step": step, "rule": "mean", "run": run, "wall": 1.0 + step}
        row |= {"message": "mean: far off", "evidence": {"attempt": 1}, "actions": actions}
        return Put("firings", row)

    def pin(step: int, payloads: int, gone: int = 0) -> dict[str, object]:
        return {"step": step, "payloads": payloads, "bytes": 9, "gone": gone, "reasons": []}

    told = {"host": "hooks.example.com", "delivered": True, "reason": None}
    first = {"pin": {"steps": [pin(3, 2), pin(4, 1)]}, "capture": {"capture_id": "c1"}}
    second = {"pin": {"steps": [pin(4, 1), pin(5, 3)]}, "webhook": told}
    refused = {"pin": {"steps": [pin(4, 0, 6)]}, "capture": {"refused": "no room"}}
    refused |= {"webhook": {**told, "delivered": False, "reason": "timed out"}}
    with service(tmp_path) as running:
        for run in ("r", "s"):
            Rank(running, run=run).begin(STAGE, 1)
        rows = [fired(4, 1, "r", first), fired(5, 1, "r", second), fired(6, 1, "r", None)]
        running.store.submit([*rows, fired(4, 2, "s", refused)]).result(30)
        assert running.tokens is not None
        monkeypatch.setenv("STAGESCOPE_URL", running.server.url)
        monkeypatch.setenv("STAGESCOPE_TOKEN", running.tokens.read)
        with stagescope.attach() as session:
            firings = session.firings()
        assert {group["run"]: group["outcomes"] for group in firings.groups} == {
            "r": [
                "capture c1 requested",
                "pinned 6 payloads of steps 3-5",
                "webhook hooks.example.com told",
                "actions are not taken yet of 1",
            ],
            "s": [
                "capture refused: no room",
                "pinned no payload of step 4: none were left (6 had left the ring before)",
                "webhook hooks.example.com not told: timed out",
            ],
        }
        for shown in (repr(firings), firings._repr_html_(), printed("triggers", "firings")):
            assert "mean: run r, steps 4-6" in shown
            assert "mean: run s, step 4" in shown
            assert "capture c1 requested" in shown
            assert "none were left" in shown
        assert "run r" not in printed("triggers", "firings", "--run", "r").partition("\n")[2]
