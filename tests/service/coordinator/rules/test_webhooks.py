"""Calls of webhooks over HTTP, against servers that hold messages to the tools' documentation."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from tests.service.rules.test_messages import TOOLS, told
from tests.support.answering import unused_port
from tests.support.chat_services import SECRET, TOKEN, ChatService, chat_service
from tests.support.proxy import running_proxy, set_proxy

from stagescope_service.coordinator.rules.webhooks import MAX_ANSWER, Delivery, Webhooks
from stagescope_service.rules.webhooks import Webhook

SIGNED = ("feishu", "dingtalk")


def call(service: ChatService, **changes: Any) -> str:
    """Tell a service of a firing; return why it was not told."""
    webhook = Webhook.parse({**service.webhook(), **changes}, "webhook")
    return asyncio.run(Webhooks(seconds=5.0, pauses=(0.0, 0.0)).call(webhook, told()))


def try_once(service: ChatService, **changes: Any) -> Delivery:
    webhook = Webhook.parse({**service.webhook(), **changes}, "webhook")
    return asyncio.run(Webhooks().try_once(webhook, told(), 5.0))


@pytest.mark.parametrize("tool", [*TOOLS, "json"])
def test_a_message_is_taken_and_the_answer_told(tool: str) -> None:
    with chat_service(tool) as service:
        assert call(service) == ""
        delivery = try_once(service)
        assert len(service.took) == 2
    says = {"json": "200", "slack": "200 ok", "feishu": "200, code 0: success"}
    assert delivery == Delivery(says.get(tool, "200, code 0: ok"))
    assert "qwen3-8b" in json.dumps(service.took[0])


@pytest.mark.parametrize("tool", SIGNED)
def test_a_signature_is_checked_by_the_other_side(tool: str) -> None:
    with chat_service(tool, signed=True) as service:
        assert call(service, secret=SECRET) == ""
        for wrong in ({}, {"secret": "another"}):
            reason = call(service, **wrong)
            assert reason.endswith("(1 try)")
            assert "sign" in reason
        webhook = Webhook.parse(service.webhook(signed=True), "webhook")
        late = Webhooks(pauses=(), wall=lambda: 1_000_000.0)
        assert "sign" in asyncio.run(late.call(webhook, told()))
        assert len(service.took) == 1
        if tool == "dingtalk":
            assert service.asked[0].startswith(f"/robot/send?access_token={TOKEN}&timestamp=1")


@pytest.mark.parametrize(
    ("tool", "status", "body", "reason", "tries"),
    [
        ("slack", 404, "no_service", "it answered 404 no_service", 1),
        ("slack", 400, "invalid_blocks", "it answered 400 invalid_blocks", 1),
        ("slack", 403, "<html>{path}</html>", "it answered 403", 1),
        ("slack", 500, "rollup_error", "it answered 500 rollup_error", 3),
        ("slack", 302, "", "it answered 302", 1),
        ("feishu", 200, {"code": 19024, "msg": "Key Words Not Found"},
         "it answered 200, code 19024: Key Words Not Found", 1),
        ("feishu", 200, {"code": 11232, "msg": "frequency limited"},
         "it answered 200, code 11232: frequency limited", 3),
        ("feishu", 200, {"StatusCode": 9499}, "it answered 200, code 9499", 1),
        ("feishu", 200, {"code": 0, "msg": "success"}, "", 1),
        ("dingtalk", 200, {"errcode": 310000, "errmsg": "keywords\nnot\tin content"},
         "it answered 200, code 310000: keywords not in content", 1),
        ("dingtalk", 200, {"errcode": 130101, "errmsg": "send too fast"},
         "it answered 200, code 130101: send too fast", 3),
        ("wecom", 200, {"errcode": 93000, "errmsg": "invalid webhook url, hint: [1]"},
         "it answered 200, code 93000: invalid webhook url, hint: [1]", 1),
        ("wecom", 200, {"errcode": 1, "errmsg": "no robot at {path}"},
         "code 1: (its text repeats parts of the webhook's address)", 1),
        ("wecom", 200, {"errcode": 1, "errmsg": f"unknown key {TOKEN[6:18]}…"},
         "code 1: (its text repeats parts of the webhook's address)", 1),
        ("wecom", 200, {"errcode": 1, "errmsg": "x" * 5000}, "x…", 1),
        ("wecom", 200, "<html>log in</html>", "without the code that wecom answers", 1),
        ("wecom", 200, ["errcode"], "without the code that wecom answers", 1),
        ("wecom", 200, {"errcode": True}, "without the code that wecom answers", 1),
        ("wecom", 200, "[" * 60_000, "without the code that wecom answers", 1),
        ("wecom", 502, {"errcode": 0}, "it answered 502", 3),
    ],
)  # fmt: skip
def test_an_error_is_told_with_its_reason_and_without_secrets(
    tool: str, status: int, body: object, reason: str, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with chat_service(tool) as service:
        service.answers += [(status, body)] * tries
        found = call(service)
        assert len(service.asked) == tries
        assert not service.answers
    assert reason in found
    assert len(found) < 300
    assert found.endswith(f"({tries} {'try' if tries == 1 else 'tries'})") or not reason
    for secret in (TOKEN, TOKEN[6:18]):
        assert secret not in found
        assert secret not in caplog.text


def test_a_proxy_of_the_environment_is_not_told_and_named_where_the_way_may_need_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with chat_service("json") as service, running_proxy() as proxy:
        set_proxy(monkeypatch, proxy)
        assert call(service) == ""
        gone = f"http://127.0.0.1:{unused_port()}/hook"
        reason = asyncio.run(Webhooks(pauses=()).call(Webhook.parse(gone, "webhook"), told()))
        assert "webhooks are called directly, http_proxy is not used" in reason
        assert proxy.tokens == []


def test_no_more_of_an_answer_is_read_than_says_something() -> None:
    with chat_service("feishu") as service:
        service.answers.append((200, {"msg": "y" * (64 << 20), "code": 0}))
        assert "without the code" in call(service)
        service.answers.append((200, {"code": 0, "msg": "y" * (MAX_ANSWER - 100)}))
        assert call(service) == ""


def test_only_hosts_that_are_allowed_are_called() -> None:
    with chat_service("json") as service:
        webhook = Webhook.parse(service.url, "webhook")
        for hosts, count in ((("hooks.example.com",), 0), (("127.0.0.1",), 1), ((), 2)):
            reason = asyncio.run(Webhooks(hosts=hosts, pauses=()).call(webhook, told()))
            assert bool(reason) == ("hooks.example.com" in hosts)
            assert len(service.took) == count
        assert asyncio.run(Webhooks(hosts=["other"]).call(webhook, told())) == (
            "its host is not among STAGESCOPE_WEBHOOK_HOSTS (1 try)"
        )
    coded = Webhook.parse(
        "http://XN--fiqs8s.invalid/", "webhook"
    )  # as the allowed ones are written
    reason = asyncio.run(Webhooks(hosts=["xn--fiqs8s.invalid"], pauses=()).call(coded, told()))
    assert "it cannot be reached" in reason
