"""The webhook of a rule: its URL, the format of its messages, and its secret."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final, Literal, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from stagescope_wire.errors import InvalidPlan
from stagescope_wire.nonfinite import Json

Format: TypeAlias = Literal["json", "slack", "feishu", "dingtalk", "wecom"]

FORMATS: Final = ("json", "slack", "feishu", "dingtalk", "wecom")
_OF_HOST: Final[Mapping[str, Format]] = {
    "hooks.slack.com": "slack",
    "open.feishu.cn": "feishu",
    "open.larksuite.com": "feishu",
    "oapi.dingtalk.com": "dingtalk",
    "qyapi.weixin.qq.com": "wecom",
}
_SIGNED: Final = ("feishu", "dingtalk")
_URL: Final = "a complete URL of http or https (answers show only its host)"
_MAX_URL: Final = 2000
_PATH_WORDS: Final = frozenset(
    {"services", "open-apis", "bot", "hook", "robot", "send", "cgi-bin", "webhook"}
)
"""Parts of the chat tools' documented paths, which are no secrets."""


@dataclasses.dataclass(frozen=True)
class Webhook:
    """A webhook.

    Attributes:
        url: It may contain secrets: show only `host`.
        format: The format of the message: JSON, or the message of a chat tool.
        secret: Signs the message if the chat tool requires it.
    """

    url: str = dataclasses.field(repr=False)
    format: Format = "json"
    secret: str | None = dataclasses.field(default=None, repr=False)

    @classmethod
    def parse(cls, value: object, field: str) -> Webhook:
        """Parse a URL, or a mapping of `url`, `format` and `secret`.

        Raises:
            InvalidPlan: with the field that is wrong, never with its value.
        """
        if not isinstance(value, Mapping):
            url = _checked_url(value, field)
            return cls(url, _OF_HOST.get(host_of(url), "json"))
        # No error shows a key or a value: one that is out of place may be a secret.
        if not value.keys() <= {"url", "format", "secret"}:
            raise InvalidPlan(f"{field} has other fields", expected="url, format and secret")
        url = _checked_url(value.get("url"), f"{field}.url")
        chosen = value.get("format") or _OF_HOST.get(host_of(url), "json")
        if chosen not in FORMATS:
            raise InvalidPlan(f"{field}.format is unknown", expected=f"one of {', '.join(FORMATS)}")
        secret = value.get("secret")
        if secret is not None:
            if chosen not in _SIGNED:
                raise InvalidPlan(
                    f"{field} of format {chosen} has a secret",
                    expected=f"none: only {' and '.join(_SIGNED)} sign messages with one",
                )
            if not isinstance(secret, str) or not 0 < len(secret) <= 500 or not _plain(secret):
                raise InvalidPlan(
                    f"{field}.secret cannot be used",
                    expected="1 to 500 ASCII characters without spaces, as the tool shows them",
                )
        return cls(url, cast(Format, chosen), secret)

    @property
    def host(self) -> str:
        """The host, the only part of the URL that may be shown."""
        return host_of(self.url)

    def wire(self, *, secrets: bool) -> Json:
        """Return the form that `parse` reads; without `secrets` the host, and a chat's format."""
        if not secrets:
            return (
                self.host if self.format == "json" else {"host": self.host, "format": self.format}
            )
        if self.secret is None and self.format == _OF_HOST.get(self.host, "json"):
            return self.url
        document = {"url": self.url, "format": self.format}
        return document | ({} if self.secret is None else {"secret": self.secret})

    def check_host(self, allowed: Collection[str], field: str) -> None:
        """Refuse a host that is not among `allowed` (empty: any host is).

        Raises:
            InvalidPlan: with the host and the allowed ones.
        """
        if allowed and self.host not in allowed:
            raise InvalidPlan(
                f"{field} has the host {self.host}, which is not allowed",
                expected=f"a host of STAGESCOPE_WEBHOOK_HOSTS: {', '.join(sorted(allowed))}",
            )

    def reveals(self, text: str) -> bool:
        """Return whether a text repeats eight characters of the secret, or of a secret in the URL.

        Shorter secrets count whole.
        """
        parts = urlsplit(self.url)
        pieces = [parts.username, parts.password, parts.fragment, self.secret]
        pieces += [piece for piece in parts.path.split("/") if piece not in _PATH_WORDS]
        pieces += [each.partition("=")[2] for each in parts.query.split("&")]
        known = {each for piece in pieces if piece for each in (piece, unquote(piece))}
        windows = (
            each[at : at + 8]
            for each in known
            if len(each) > 3
            for at in range(max(len(each) - 7, 1))
        )
        return any(window in text for window in windows)


def host_of(url: str) -> str:
    """Return the host of a URL, without its port, user, path or query."""
    return urlsplit(url).hostname or ""


def is_url(value: object) -> bool:
    """Return whether a value is a URL of http or https that can be called."""
    try:
        parts = urlsplit(value) if isinstance(value, str) and len(value) <= _MAX_URL else None
        good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
        good = good and (parts is None or parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return good and isinstance(value, str) and _plain(value)


def _plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _checked_url(value: object, field: str) -> str:
    # The error omits the value: the URL of a webhook may contain a secret.
    if not isinstance(value, str) or not is_url(value):
        raise InvalidPlan(f"{field} cannot be called", expected=_URL)
    return value
