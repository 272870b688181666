"""Messages of chat tools: held to the tools' limits and markup whatever a firing says."""

from __future__ import annotations

import json
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.chat_services import CHECKS

from stagescope_service.rules.document import Rules
from stagescope_service.rules.messages import FiringMessage, link_of, request_of
from stagescope_service.rules.webhooks import Webhook
from stagescope_wire.errors import InvalidPlan

TOOLS = ("slack", "feishu", "dingtalk", "wecom")
PAGE = "https://head.example.com:8443/stagescope"


def told(**changes: Any) -> FiringMessage:
    """A firing."""
    firing: Any = {
        "rule": "worst_round", "run": "qwen3-8b", "attempt_id": 3, "attempt": 2, "step": 33,
        "stage": "actor_compute_log_prob", "role": "actor", "rank": 3, "round": 1,
        "message": "per_round/max_diff_value of step 33 is 0.31, over 0.05", "wall": 1.0,
        "evidence": {"value": 0.31}, "severity": "error", "advice": "compare this rank's weights",
        "actions": {
            "capture": {"capture_id": "c-17"},
            "pin": {"steps": [{"step": 32, "payloads": 2, "bytes": 9, "gone": 0, "reasons": []}]},
        },
        "link": link_of(PAGE, "qwen3-8b", 33, 2),
    }  # fmt: skip
    return cast(FiringMessage, firing | changes)


def message(tool: str, firing: FiringMessage, secret: str | None = None) -> tuple[str, bytes]:
    webhook = Webhook("https://host/path?token=T", tool, secret)  # type: ignore[arg-type]
    return request_of(webhook, firing, 1_599_360_473.25)


@pytest.mark.parametrize("tool", TOOLS)
def test_says_everything_in_the_form_that_the_tool_documents(tool: str) -> None:
    _, content = message(tool, told())
    CHECKS[tool](content)
    text = content.decode()
    for word in (
        "error: worst_round at step 33 of qwen3-8b", "is 0.31, over 0.05", "attempt", "actor 3",
        "actor_compute_log_prob", "compare this rank's weights", "capture c-17 ordered",
        "pinned step 32", f"{PAGE}/#/runs/qwen3-8b/steps/33?attempt=2",
    ):  # fmt: skip
        assert word in text, word
    assert "TEST" not in text
    assert "stagescope TEST, " in message(tool, told(test=True))[1].decode()


def test_json_is_the_firing_itself() -> None:
    assert json.loads(message("json", told())[1]) == told()


MARKUP = (
    "<!channel>", "<@all>", "<at id=all></at>", "[x](http://x)", "**b**", "`c`", "&lt;", "&",
    "# h", "> q", "<font color='info'>", "\n- x", "|", "\uffe5", "\U0001d11e", "\u202e", "\ud800",
)  # fmt: skip
TEXTS = st.one_of(
    st.text(max_size=3000),
    st.lists(st.sampled_from(MARKUP), max_size=60).map("".join),
    st.sampled_from(MARKUP).map(lambda part: part * 700),
)


@settings(max_examples=60, deadline=None)
@given(
    message_=TEXTS, advice=TEXTS, stage=st.none() | TEXTS, run=TEXTS.map(lambda t: t[:100]),
    rule=TEXTS.map(lambda t: t[:100]), refused=TEXTS, severity=st.sampled_from((None, "info")),
)  # fmt: skip
def test_no_value_is_markup_or_too_long(
    message_: str, advice: str, stage: str | None, run: str, rule: str, refused: str,
    severity: str | None,
) -> None:  # fmt: skip
    link = link_of(PAGE, run.encode("utf-8", "replace").decode(), 33, None)
    firing = told(
        message=message_, advice=advice, stage=stage, run=run, rule=rule, link=link,
        severity=severity, actions={"capture": {"refused": refused}},
    )  # fmt: skip
    for tool in TOOLS:
        url, content = message(tool, firing)
        CHECKS[tool](content)
        assert url == "https://host/path?token=T"


def test_signatures_are_those_that_the_documented_samples_compute() -> None:
    webhook = Webhook("https://host/hook", "feishu", "demo")
    _, content = request_of(webhook, told(), 100.0)
    signed = json.loads(content)
    assert signed["timestamp"] == "100"
    assert signed["sign"] == "jquNHnVOwmDRfw+vqTIrY5dooJAgi5EcRtLsQE4wfXg="
    CHECKS["feishu"](content)
    url, _ = message("dingtalk", told(), "this is secret")
    query = parse_qs(urlsplit(url).query)
    assert query["token"] == ["T"]
    assert url.endswith("aEB%2FUfbpTXqmpw%3D")
    assert query["timestamp"] == ["1599360473250"]
    assert query["sign"] == ["VqWx7pxsj88ioT1GhN36IgqzQKzBeaEB/UfbpTXqmpw="]


@pytest.mark.parametrize(
    ("url", "format"),
    [
        ("https://hooks.slack.com/services/T/B/x", "slack"),
        ("https://open.feishu.cn/open-apis/bot/v2/hook/x", "feishu"),
        ("https://open.larksuite.com/open-apis/bot/v2/hook/x", "feishu"),
        ("https://oapi.dingtalk.com/robot/send?access_token=x", "dingtalk"),
        ("https://QYAPI.weixin.qq.com/cgi-bin/webhook/send?key=x", "wecom"),
        ("https://example.com/hooks.slack.com", "json"),
    ],
)
def test_the_host_tells_the_format(url: str, format: str) -> None:
    found = Webhook.parse(url, "webhook")
    assert found.format == format
    assert found.wire(secrets=True) == url
    assert Webhook.parse({"url": url}, "webhook") == found
    shown = found.host if format == "json" else {"host": found.host, "format": format}
    assert found.wire(secrets=False) == shown
    assert "/x" not in repr(found)
    assert Webhook.parse({"url": url, "format": "json"}, "webhook").format == "json"


def test_a_secret_is_kept_and_never_shown() -> None:
    given_ = {"url": "https://gateway/robot?access_token=TOKEN", "format": "dingtalk",
              "secret": "SECRET"}  # fmt: skip
    webhook = Webhook.parse(given_, "webhook")
    assert webhook.wire(secrets=True) == given_
    assert webhook.wire(secrets=False) == {"host": "gateway", "format": "dingtalk"}
    assert "SECRET" not in repr(webhook)
    assert webhook.reveals("x SECRET y")
    assert webhook.reveals("token TOKEN is unknown")
    assert not webhook.reveals("robot is unknown")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(
            ({"url": url}, "webhook.url cannot be called")
            for url in (
                "ftp://example.com/SECRET", "file:///SECRET", "http:///SECRET", "SECRET",
                "https://example.com:99999999/SECRET", "https://exa mple.com/SECRET",
                ["http://SECRET"], "http://example.com/SECRET\nHost: other",
            )
        ),
        ({"format": "slack"}, "webhook.url cannot be called"),
        ({"url": "http://h/SECRET", "format": "SECRET"}, "webhook.format is unknown"),
        ({"url": "http://h/SECRET", "format": ["slack"]}, "webhook.format is unknown"),
        ({"url": "http://h/SECRET", "format": "slack", "secret": "SECRET"}, "has a secret"),
        ({"url": "http://h/SECRET", "secret": "SECRET"}, "of format json has a secret"),
        ({"url": "http://h/", "format": "feishu", "secret": "SEC RET"}, "secret cannot be used"),
        ({"url": "http://h/", "format": "feishu", "secret": 7}, "secret cannot be used"),
        ({"http://h/SECRET": None}, "webhook has other fields"),
        ({"host": "hooks.slack.com", "format": "slack"}, "webhook has other fields"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_without_being_shown(value: Any, expected: str) -> None:
    with pytest.raises(InvalidPlan, match=expected) as caught:
        Webhook.parse(value, "webhook")
    assert "SECRET" not in str(caught.value)


def test_hosts_that_are_not_allowed_are_refused() -> None:
    def rules(url: str) -> Rules:
        rule = {"name": "r", "metric": "counts/tokens", "when": {">": 1}}
        actions = {"webhook": url}
        return Rules.parse({"rules": [{**rule, "actions": actions}]})

    allowed = ("hooks.example.com",)
    rules("https://hooks.example.com:8443/SECRET").check_hosts(allowed)
    rules("https://anything/SECRET").check_hosts(())
    for url in (
        "https://other/SECRET", "https://hooks.example.com@other/SECRET",
        "https://hooks.example.com.other/", "https://other\\@hooks.example.com.evil/",
    ):  # fmt: skip
        with pytest.raises(InvalidPlan, match=r"rules\[0\].actions.webhook has the host") as why:
            rules(url).check_hosts(allowed)
        assert "STAGESCOPE_WEBHOOK_HOSTS: hooks.example.com" in str(why.value)
        assert "SECRET" not in str(why.value)
