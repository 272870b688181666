"""Chat tools on loopback: they hold messages to the tools' documentation and answer as they do."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

TOKEN: Final = "a1b2c3d4-TOKEN-e5f6a7b8"
"""The secret part of every tool's address."""
SECRET: Final = "SEC0123456789abcdefSECRET"
PATHS: Final = {
    "json": f"/any/{TOKEN}",
    "slack": f"/services/T0AAAAAAA/B0BBBBBBB/{TOKEN}",
    "feishu": f"/open-apis/bot/v2/hook/{TOKEN}",
    "dingtalk": f"/robot/send?access_token={TOKEN}",
    "wecom": f"/cgi-bin/webhook/send?key={TOKEN}",
}


class Refused(Exception):
    """A message that a tool does not take: its answer's status and body."""

    def __init__(self, status: int, body: object) -> None:
        self.status, self.body = status, body
        super().__init__(body)


# --- what the tools take ------------------------------------------------------------------------
def check_slack(body: bytes) -> None:
    """An incoming webhook's message of Block Kit."""
    message = json.loads(body)
    if not 0 < len(message.get("text", "")) <= 4000:
        raise Refused(400, "no_text")
    if not 0 < len(message["blocks"]) <= 50:
        raise Refused(400, "invalid_blocks")
    texts = [message["text"]]
    for block in message["blocks"]:
        text = block["text"]
        most = {"header": 150, "section": 3000}[block["type"]]
        if not 0 < len(text["text"]) <= most:
            raise Refused(400, "invalid_blocks")
        if text["type"] == "plain_text":
            texts.append(text["text"])
        elif not re.fullmatch(r"<https?://[^<>|\s]+\|[^<>&]+>", text["text"]):
            raise Refused(400, "invalid_blocks")
    for text in texts:
        if re.search(r"[<>]|&(?!(amp|lt|gt);)", text):
            raise Refused(400, "invalid_payload")


def check_feishu(body: bytes) -> None:
    """A custom bot's interactive card."""
    if len(body) > 20_000:
        raise Refused(200, {"code": 9499, "msg": "Bad Request", "data": {}})
    message = json.loads(body)
    card = message["card"]
    texts = [card["header"]["title"]]
    for element in card["elements"]:
        if element["tag"] == "div":
            texts += [element["text"]] if "text" in element else []
            texts += [field["text"] for field in element.get("fields", ())]
        else:
            assert element["tag"] == "action"
            (button,) = element["actions"]
            assert re.fullmatch(r"https?://\S+", button["url"])
            texts.append(button["text"])
    assert message["msg_type"] == "interactive"
    assert card["header"]["template"] in ("red", "orange", "blue", "grey")
    for text in texts:
        assert text["tag"] == "plain_text"
        assert text["content"]


def check_dingtalk(body: bytes) -> None:
    """A custom robot's message of Markdown."""
    message = json.loads(body)
    assert message["msgtype"] == "markdown"
    assert message["markdown"]["title"]
    check_markdown(message["markdown"]["text"])
    if len(body) > 20_000:
        raise Refused(200, {"errcode": 460101, "errmsg": "message too long, exceed 20000 bytes"})


def check_wecom(body: bytes) -> None:
    """A group robot's message of Markdown."""
    message = json.loads(body)
    assert message["msgtype"] == "markdown"
    content = message["markdown"]["content"]
    if len(content.encode()) > 4096:
        answer = {"errcode": 40058, "errmsg": "markdown.content exceed max length 4096"}
        raise Refused(200, answer)
    head, _, rest = content.partition("\n")
    found = re.fullmatch(r'### <font color="(info|comment|warning)">([^<]+)</font>', head)
    assert found, head
    check_markdown(rest)


def check_markdown(text: str) -> None:
    """Markdown in which each line begins with its own markup, and no value has any."""
    for line in filter(None, text.split("\n")):
        link = re.fullmatch(r"\[[^\[\]<>*`]+\]\(https?://[^()\s<>]+\)", line)
        own = re.fullmatch(r"(### |> \w+: |- \*\*\w+\*\*: |\*\*[\w ]+\*\*: )(.*)", line)
        assert link or own, line
        assert link or not re.search(r"[<*`\[\]]", own[2] if own else line), line


CHECKS: Final = {
    "slack": check_slack,
    "feishu": check_feishu,
    "dingtalk": check_dingtalk,
    "wecom": check_wecom,
}


def _check_signature(tool: str, query: dict[str, list[str]], body: bytes) -> None:
    """Feishu signs in the body by seconds, DingTalk in the address by milliseconds."""
    if tool == "feishu":
        message = json.loads(body)
        stamp, sign = message.get("timestamp", "0"), message.get("sign", "")
        assert isinstance(stamp, str)
        key, text, seconds = f"{stamp}\n{SECRET}", "", float(stamp)
        why: object = {"code": 19021, "msg": "sign match fail or timestamp is not within one hour"}
    else:
        stamp, sign = query.get("timestamp", ["0"])[0], query.get("sign", [""])[0]
        key, text, seconds = SECRET, f"{stamp}\n{SECRET}", float(stamp) / 1000
        why = {"errcode": 310000, "errmsg": "sign not match"}
    made = hmac.new(key.encode(), text.encode(), hashlib.sha256).digest()
    if base64.b64encode(made).decode() != sign or abs(time.time() - seconds) > 3600:
        raise Refused(200, why)


# --- the server ---------------------------------------------------------------------------------
@dataclasses.dataclass
class ChatService:
    """A tool on loopback, the messages that it took, and what it answers next instead."""

    url: str
    tool: str
    took: list[Any]
    answers: list[tuple[int, object]]
    """Status and body of each of the next answers; `{path}` in a text becomes the asked path."""
    asked: list[str]
    """Path and query of each request."""

    def webhook(self, *, signed: bool = False) -> dict[str, str]:
        """The webhook of a rule."""
        named = {"url": self.url, "format": self.tool}
        return named | ({"secret": SECRET} if signed else {})


@contextmanager
def chat_service(tool: str, *, signed: bool = False) -> Iterator[ChatService]:
    """Serve a tool; where `signed` it asks for signatures."""
    service = ChatService("", tool, [], [], [])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            service.asked.append(self.path)
            try:
                self._answer(*self._judge(body))
            except Refused as refused:
                self._answer(refused.status, refused.body)

        def _judge(self, body: bytes) -> tuple[int, object]:
            if service.answers:
                return service.answers.pop(0)
            parts = urlsplit(self.path)
            query = parse_qs(parts.query)
            if TOKEN not in self.path:
                raise Refused(404, "no_service")
            assert self.headers["content-type"] == "application/json; charset=utf-8"
            if signed:
                _check_signature(tool, query, body)
            if tool != "json":
                try:
                    CHECKS[tool](body)
                except (AssertionError, KeyError, TypeError) as error:
                    raise Refused(400, f"not as documented: {error!r}") from error
            service.took.append(json.loads(body))
            taken: dict[str, object] = {
                "slack": "ok",
                "feishu": {"StatusCode": 0, "StatusMessage": "success", "code": 0, "data": {},
                           "msg": "success"},
            }  # fmt: skip
            return 200, taken.get(tool, {"errcode": 0, "errmsg": "ok"})

        def _answer(self, status: int, body: object) -> None:
            text = body if isinstance(body, str) else json.dumps(body)
            content = text.replace("{path}", self.path).encode()
            self.send_response(status)
            self.send_header("location", "/elsewhere")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args  # nothing of it on the tests' stderr

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        service.url = f"http://127.0.0.1:{server.server_address[1]}{PATHS[tool]}"
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
