"""The messages of a webhook: a firing as JSON, or in the format of a chat tool.

Formats and limits are those of the tools' documentation:

- Slack: Block Kit with a text for notifications; `&`, `<` and `>` as entities. A header holds 150
  characters, another text 3000, the text for notifications 4000.
- Feishu (Lark): an interactive card; a body of at most 20 KB. Its texts are `plain_text`, in which
  nothing is markup.
- DingTalk: Markdown; a message of at most 20000 bytes.
- WeCom: Markdown of at most 4096 bytes.

DingTalk and WeCom document no escapes. Similar characters replace their markup's characters, so
that no value becomes a link, a mention or a heading.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypedDict
from urllib.parse import urlencode, urlsplit, urlunsplit

from typing_extensions import NotRequired

from stagescope_service.rules.webhooks import Webhook
from stagescope_service.store.tables.findings import FiredActions
from stagescope_wire import nonfinite
from stagescope_wire.links import page_of_run
from stagescope_wire.nonfinite import Json

SLACK_HEADER: Final = 150
SLACK_SECTION: Final = 3000
SLACK_TEXT: Final = 4000
FEISHU_BYTES: Final = 20_000
DINGTALK_BYTES: Final = 20_000
WECOM_BYTES: Final = 4096
_TITLE: Final = 120
_LONGEST: Final = (2000, 1000, 500, 250, 120, 60, 30)
"""Maximum characters of a value, tried in this order until the message fits."""
_SIMILAR: Final = str.maketrans("<*[]`", "\uff1c\uff0a\uff3b\uff3d'")
"""Fullwidth characters, and an apostrophe for the mark of code."""
_OPENS: Final = "Open in stagescope"
_FEISHU_COLOURS: Final = {"error": "red", "warning": "orange", "info": "blue"}
_WECOM_COLOURS: Final = {"error": "warning", "warning": "warning", "info": "info"}


class FiringMessage(TypedDict):
    """A firing as a webhook receives it."""

    rule: str
    run: str
    attempt_id: int
    attempt: int | None
    step: int
    stage: str | None
    role: str | None
    rank: int | None
    round: int | None
    message: str
    wall: float
    evidence: dict[str, Json]
    severity: str | None
    advice: str
    actions: FiredActions
    link: str | None
    """The page of the step; None where the API's address is unknown."""
    test: NotRequired[bool]
    """True in a test message, whose firing is over or made up."""


def link_of(page: str, run: str, step: int, attempt: int | None) -> str:
    """Return the address of a step's page (`ofStep` in http/static/address.js).

    Args:
        page: address of the service's page, such as `http://head:8700`.
        run: name of the run.
        step: number of the step.
        attempt: number of its attempt; None: the newest.
    """
    query = "" if attempt is None else f"?attempt={attempt}"
    return f"{page_of_run(page, run)}/steps/{step}{query}"


def request_of(webhook: Webhook, firing: FiringMessage, now: float) -> tuple[str, bytes]:
    """Return the URL to call, signed where the webhook has a secret, and the body to post.

    Args:
        webhook: the receiver.
        firing: the firing.
        now: Unix seconds.
    """
    content = _BUILDERS[webhook.format](firing)
    if webhook.secret is None:
        return webhook.url, content
    if webhook.format == "feishu":
        seconds = str(int(now))
        key = f"{seconds}\n{webhook.secret}"
        signed = {"timestamp": seconds, "sign": _hmac(key, ""), **json.loads(content)}
        return webhook.url, _encoded(signed)
    milliseconds = str(int(now * 1000))
    sign = _hmac(webhook.secret, f"{milliseconds}\n{webhook.secret}")
    parts = urlsplit(webhook.url)
    query = "&".join(
        filter(None, (parts.query, urlencode({"timestamp": milliseconds, "sign": sign})))
    )
    return urlunsplit(parts._replace(query=query, fragment="")), content


def _hmac(key: str, text: str) -> str:
    return base64.b64encode(hmac.digest(key.encode(), text.encode(), hashlib.sha256)).decode()


def _json(firing: FiringMessage) -> bytes:
    return nonfinite.dumps(firing).encode()


# --- the parts of a message -------------------------------------------------------------------
class _Parts(NamedTuple):
    """The texts of a message, each of one line, without markup."""

    title: str
    message: str
    facts: tuple[tuple[str, str], ...]
    """Names and values; unknown ones are left out."""
    advice: str
    done: str
    """The actions of the service; empty if there were none."""

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Names and texts of the advice and of the actions; absent ones are left out."""
        texts = (("What to try", self.advice), ("Done", self.done))
        return tuple(each for each in texts if each[1])


def _parts(firing: FiringMessage, most: int) -> _Parts:
    """Return the parts of a message, each value cut to `most` characters."""

    def cut(text: object) -> str:
        return shortened(one_line(str(text)), most)

    what = f"{firing['severity'] or 'notice'}: {firing['rule']}"
    title = f"{what} at step {firing['step']} of {firing['run']}"
    is_test = firing.get("test", False)
    rank = firing["rank"]
    who = firing["role"] if rank is None else f"{firing['role'] or 'rank'} {rank}"
    named = {
        "run": firing["run"],
        "attempt": firing["attempt"],
        "step": firing["step"],
        "stage": firing["stage"],
        "role" if rank is None else "rank": who,
        "round": firing["round"],
    }
    return _Parts(
        title=shortened(
            f"stagescope {'TEST, ' if is_test else ''}{one_line(title)}", min(most, _TITLE)
        ),
        message=cut(firing["message"]) or "-",
        facts=tuple((name, cut(value)) for name, value in named.items() if value is not None),
        advice=cut(firing["advice"]),
        done=cut("; ".join(_outcomes(firing["actions"]))),
    )


def _outcomes(actions: FiredActions) -> list[str]:
    texts = []
    capture = actions.get("capture", {})
    if "capture_id" in capture:
        texts.append(f"capture {capture['capture_id']} ordered")
    elif "refused" in capture:
        texts.append(f"no capture: {capture['refused']}")
    if "pin" in actions:
        steps = [str(each["step"]) for each in actions["pin"]["steps"] if each["payloads"]]
        noun = "step" if len(steps) == 1 else "steps"
        texts.append(f"pinned {noun} {', '.join(steps)}" if steps else "no payload left to pin")
    return texts


def one_line(text: str) -> str:
    """Return a text on one line, without characters that do not print."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def shortened(text: str, most: int) -> str:
    """Return at most `most` characters of a text; an ellipsis ends one that is cut."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def _fitting(firing: FiringMessage, build: Callable[[_Parts], bytes | None]) -> bytes:
    """Return the message with the longest values that `build` accepts."""
    for most in _LONGEST:
        content = build(_parts(firing, most))
        if content is not None:
            return content
    raise AssertionError("a message of the shortest values fits")


def _encoded(document: object) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


# --- Slack ------------------------------------------------------------------------------------
def _slack(firing: FiringMessage) -> bytes:
    def build(parts: _Parts) -> bytes | None:
        facts = " · ".join(f"{name} {value}" for name, value in parts.facts)
        texts = [parts.message, facts, *(f"{name}: {text}" for name, text in parts.sections)]
        texts = [_entities(text) for text in texts]
        title = _entities(parts.title)
        blocks: list[Json] = [{"type": "header", "text": _plain_text(title)}]
        blocks += [{"type": "section", "text": _plain_text(text)} for text in texts]
        link = firing["link"]
        if link is not None:
            # A link, no button: Slack warns of buttons of apps that take no interactions.
            texts.append(f"<{_entities(link)}|{_OPENS}>")
            blocks.append({"type": "section", "text": {"type": "mrkdwn", "text": texts[-1]}})
        notification = f"{title}: {texts[0]}"
        fits = len(title) <= SLACK_HEADER and max(map(len, texts)) <= SLACK_SECTION
        fits = fits and len(notification) <= SLACK_TEXT
        return _encoded({"text": notification, "blocks": blocks}) if fits else None

    return _fitting(firing, build)


def _plain_text(text: str) -> Json:
    return {"type": "plain_text", "text": text, "emoji": False}


def _entities(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# --- Feishu -----------------------------------------------------------------------------------
def _feishu(firing: FiringMessage) -> bytes:
    def build(parts: _Parts) -> bytes | None:
        facts = [
            {"is_short": True, "text": {"tag": "plain_text", "content": f"{name}: {value}"}}
            for name, value in parts.facts
        ]
        texts = [f"{name}: {text}" for name, text in parts.sections]
        elements: list[Json] = [_div(parts.message), {"tag": "div", "fields": facts}]
        elements += map(_div, texts)
        if firing["link"] is not None:
            button = {
                "tag": "button",
                "text": {"tag": "plain_text", "content": _OPENS},
                "type": "primary",
                "url": firing["link"],
            }
            elements.append({"tag": "action", "actions": [button]})
        header = {
            "title": {"tag": "plain_text", "content": parts.title},
            "template": _FEISHU_COLOURS.get(firing["severity"] or "", "grey"),
        }
        card = {"config": {"wide_screen_mode": True}, "header": header, "elements": elements}
        content = _encoded({"msg_type": "interactive", "card": card})
        return content if len(content) <= FEISHU_BYTES - _SIGNATURE else None

    return _fitting(firing, build)


_SIGNATURE: Final = 200
"""Bytes that Feishu's signature may add."""


def _div(text: str) -> Json:
    return {"tag": "div", "text": {"tag": "plain_text", "content": text}}


# --- DingTalk and WeCom -----------------------------------------------------------------------
def _dingtalk(firing: FiringMessage) -> bytes:
    def build(parts: _Parts) -> bytes | None:
        title = _no_markup(parts.title)
        facts = [f"- **{name}**: {_no_markup(value)}" for name, value in parts.facts]
        lines = [f"### {title}", _said(parts), "\n".join(facts), *_bold(parts.sections)]
        lines += _link_line(firing)
        markdown = {"title": title, "text": "\n\n".join(lines)}
        content = _encoded({"msgtype": "markdown", "markdown": markdown})
        return content if len(content) <= DINGTALK_BYTES else None

    return _fitting(firing, build)


def _wecom(firing: FiringMessage) -> bytes:
    def build(parts: _Parts) -> bytes | None:
        colour = _WECOM_COLOURS.get(firing["severity"] or "", "comment")
        title = f'### <font color="{colour}">{_no_markup(parts.title)}</font>'
        facts = [f"> {name}: {_no_markup(value)}" for name, value in parts.facts]
        lines = [title, _said(parts), *facts, "", *_bold(parts.sections), *_link_line(firing)]
        markdown = "\n".join(lines)
        if len(markdown.encode()) > WECOM_BYTES:
            return None
        return _encoded({"msgtype": "markdown", "markdown": {"content": markdown}})

    return _fitting(firing, build)


def _said(parts: _Parts) -> str:
    # Not at the start of a line, where `#`, `-` or `1.` would be markup.
    return f"**Fired**: {_no_markup(parts.message)}"


def _bold(sections: Sequence[tuple[str, str]]) -> list[str]:
    return [f"**{name}**: {_no_markup(text)}" for name, text in sections]


def _link_line(firing: FiringMessage) -> list[str]:
    return [] if firing["link"] is None else [f"[{_OPENS}]({firing['link']})"]


def _no_markup(text: str) -> str:
    return text.translate(_SIMILAR)


_BUILDERS: Final[dict[str, Callable[[FiringMessage], bytes]]] = {
    "json": _json,
    "slack": _slack,
    "feishu": _feishu,
    "dingtalk": _dingtalk,
    "wecom": _wecom,
}
