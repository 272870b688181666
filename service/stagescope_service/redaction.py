"""Removes secrets from texts, JSON and files, before they are shown or leave the cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

LONG_ENOUGH: Final = 8
"""Least characters of a known secret: shorter ones would be found in anything."""

_WORDS: Final = (
    r"(?:secrets?|passw(?:or)?ds?|pwd|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)token|api[_-]?keys?|"
    r"access[_-]?keys?|private[_-]?keys?|credentials?|authorization|cookies?|session[_-]?key)"
)
SECRET_NAME: Final = re.compile(rf"(?:^|[_.\-/])(?:auth|{_WORDS})[_-]?\d*$", re.I)
"""Name of a field or variable whose text is a secret."""
_PATTERNS: Final = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"(?<=://)[^/\s@]+(?=@)", 0),  # https://user:password@host
        (r"(?<=bearer )[A-Za-z0-9._~+/=-]{8,}", re.I),
        (r"(?<=basic )[A-Za-z0-9+/=]{12,}", re.I),
        (r"\b(?:sk|rk|pk)[-_][A-Za-z0-9_-]{16,}", 0),
        (r"\bhf_[A-Za-z0-9]{16,}", 0),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", 0),
        (r"\bgh[pousr]_[A-Za-z0-9]{20,}", 0),
        (r"\bgithub_pat_[A-Za-z0-9_]{20,}", 0),
        (r"\bglpat-[A-Za-z0-9_-]{16,}", 0),
        (r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}", 0),
        (r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", 0),  # a JSON web token
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S),
    )
)
_ASSIGNED: Final = re.compile(
    rf"((?:^|[\s\"'&?;,{{(\[_.>\-]){_WORDS}[\"']?\s*[=:]\s*[\"']?)(?![\d.]+\b|\[redacted|bearer\b|basic\b)([^\s\"'&,;}})\]]{{6,}})",
    re.I,
)
_OPTION: Final = re.compile(rf"(--?[\w-]*{_WORDS}\s+)(?!-)([^\s\"']{{6,}})", re.I)


class Redactor:
    """Replaces each secret by a mark of its own, the same everywhere.

    Args:
        known: secrets, such as the service's tokens; they are found in the middle of texts, too.
    """

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = sorted({text for text in known if len(text) >= LONG_ENOUGH}, key=len)[::-1]
        self._marks: dict[str, str] = {}

    @property
    def count(self) -> int:
        """Number of different secrets that were found."""
        return len(self._marks)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in self._known:
            if secret in text:
                text = text.replace(secret, self._mark(secret))
        for pattern in _PATTERNS:
            text = pattern.sub(lambda match: self._mark(match[0]), text)
        for pattern in (_ASSIGNED, _OPTION):
            text = pattern.sub(lambda match: match[1] + self._mark(match[2]), text)
        return text

    def has_known(self, data: bytes) -> bool:
        """Return whether one of the known secrets is in a file that is no text."""
        return any(secret.encode() in data for secret in self._known)

    def value(self, value: Any, name: str = "") -> Any:
        """Return a value of a column, or of JSON, without secrets.

        Args:
            value: of any type; texts that are JSON objects are read as such.
            name: of its field; every text of `HF_TOKEN` is a secret.
        """
        if isinstance(value, str):
            if value and name and SECRET_NAME.search(name):
                return self._mark(value)
            return self._json_text(value) if value[:1] in ("{", "[") else self.text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self.value(item, str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return self._items(value, name)
        return value

    def _items(self, values: Iterable[object], name: str) -> list[object]:
        """Return a list's items; after `--api-key` comes a secret."""
        found: list[object] = []
        before = ""
        for value in values:
            is_secret = before.startswith("-") and "=" not in before and SECRET_NAME.search(before)
            if is_secret and isinstance(value, str) and not value.startswith("-"):
                found.append(self._mark(value))
            else:
                found.append(self.value(value, name))
            before = value if isinstance(value, str) else ""
        return found

    def _key(self, key: Any) -> object:
        return self.text(key) if isinstance(key, str) else key

    def _json_text(self, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError:
            return self.text(text)
        redacted = self.value(value)
        return text if redacted == value else json.dumps(redacted, separators=(",", ":"))

    def _mark(self, secret: str) -> str:
        if secret in self._marks.values():
            return secret
        return self._marks.setdefault(secret, f"[redacted {len(self._marks) + 1}]")


def without_secrets(text: str) -> str:
    """Return a text of a training with each secret as `[redacted]`."""
    return _MARK.sub("[redacted]", Redactor().text(text[:_LONGEST]))


_MARK: Final = re.compile(r"\[redacted \d+\]")
_LONGEST: Final = 20_000
"""Most characters of a text that are searched and returned."""
