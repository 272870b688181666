"""The two tokens of the home, to read and to operate, and who holds which token of a service.

Each of the two is in a file that only its user reads. The tokens of people, teams and programs are
in one of their own, see `access_token_file`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Final, Literal

from stagescope_service.http.access_token_file import (
    ROLES,
    TOKEN_BYTES,
    Role,
    Token,
    TokenFile,
    of_secret,
    read_private,
)
from stagescope_service.settings import Settings
from stagescope_wire.errors import InvalidInput, StoreError

Grade = Literal["read", "operate"]

_MAX_LOGINS: Final = 8
_HOME: Final[dict[Role, Token]] = {"read": Token("", "read"), "operate": Token("", "operate")}


@dataclasses.dataclass(frozen=True, slots=True)
class AccessTokens:
    """The two tokens of a service, left out of every repr and log."""

    read: str = dataclasses.field(repr=False)
    operate: str = dataclasses.field(repr=False)

    @classmethod
    def load(cls, settings: Settings) -> AccessTokens:
        """Read the tokens from the settings or from their files, which are created if missing.

        Raises:
            Forbidden: a token's file is not a plain file of this user.
            InvalidInput: a token is too short, or both are equal.
            StoreError: a token's file is missing and cannot be created.
        """
        given = {"read": settings.read_token, "operate": settings.operate_token}
        tokens = {
            grade: (secret.get_secret_value().strip() if secret else "")
            or _read_token_file(settings.home, grade)
            for grade, secret in given.items()
        }
        for grade, token in tokens.items():
            if len(token) < 16 or not token.isascii() or not token.isprintable() or " " in token:
                raise InvalidInput(
                    f"the {grade} token cannot be used",
                    expected="16 or more printable ASCII characters without spaces",
                    advice=f"delete {token_path(settings.home, grade)} to have a new one made",
                )
        if hmac.compare_digest(tokens["read"], tokens["operate"]):
            raise InvalidInput("the read and the operate token are one", expected="two tokens")
        return cls(**tokens)

    def grade(self, token: str) -> Grade | None:
        """Return what `token` allows, in constant time."""
        encoded = token.encode("utf-8", "surrogateescape")
        may_operate = hmac.compare_digest(encoded, self.operate.encode())
        may_read = hmac.compare_digest(encoded, self.read.encode())
        return "operate" if may_operate else "read" if may_read else None


class Access:
    """Who holds which token: the two of the home, and those of its `tokens.json`."""

    def __init__(self, tokens: AccessTokens, file: TokenFile) -> None:
        self._tokens = tokens
        self._file = file
        texts: dict[Role, str] = {"read": tokens.read, "operate": tokens.operate}
        self._logins: dict[Role, str] = {
            grade: hmac.new(text.encode(), f"login {grade}".encode(), hashlib.sha256).hexdigest()
            for grade, text in texts.items()
        }
        """Cookie value of each token of the home."""

    async def look(self) -> None:
        """Bring the tokens of the file up to date; call it before the other methods."""
        await self._file.look()

    def of_bearer(self, text: str) -> Token | None:
        """Return the rights of a token; None if it is unknown."""
        grade = self._tokens.grade(text)
        return _HOME[grade] if grade else of_secret(self._file.table.by_sha256, text)

    def of_person(self, name: str) -> Token | None:
        """Return the rights of a person that a proxy names; None if the person is unknown."""
        return self._file.table.by_person.get(name)

    def of_cookie(self, cookie: str) -> Token | None:
        """Return the token that a browser presented when it logged in."""
        found = [self._of_login(login) for login in cookie.split(".")[:_MAX_LOGINS]]
        own = [token for token in found if token is not None]
        return max(own, key=lambda token: ROLES.index(token.role), default=None)

    def is_valid(self, token: Token) -> bool:
        """Return whether a token has neither been removed nor changed."""
        return not token.name or self._file.table.by_name.get(token.name) == token

    def login(self, token: Token, cookie: str = "") -> str:
        """Return the cookie of a browser that presented a token.

        Browsers send a host's cookies to all of its ports, where tunnels may lead to several
        services. The logins of others that `cookie` (the one so far) holds are kept.
        """
        own = self._file.login(token) if token.name else self._logins[token.role]
        return ".".join([own, *self._others(cookie)][:_MAX_LOGINS])

    def logout(self, cookie: str) -> str:
        """Return a cookie without the logins of this service; empty where none is left."""
        return ".".join(self._others(cookie))

    def _of_login(self, login: str) -> Token | None:
        encoded = login.encode("utf-8", "surrogateescape")
        for grade, own in self._logins.items():
            if hmac.compare_digest(encoded, own.encode()):
                return _HOME[grade]
        return of_secret(self._file.table.by_login, login)

    def _others(self, cookie: str) -> list[str]:
        return [login for login in cookie.split(".") if login and self._of_login(login) is None]


def token_path(home: Path, grade: str) -> Path:
    """Return the file of the token of `grade`."""
    return home / f"{grade}.token"


def _read_token_file(home: Path, grade: str) -> str:
    """Return the content of a token's file, which is created if missing."""
    path = token_path(home, grade)
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.is_symlink() and not path.exists():
            _create_token_file(path)
    except OSError as error:
        raise StoreError(
            f"the {grade} token cannot be written in the home {home}: {error.strerror}",
            expected="a directory that this user may write",
            advice="name another with STAGESCOPE_HOME",
        ) from error
    return (read_private(path, 1000) or b"").decode("ascii", "replace").strip()


def _create_token_file(path: Path) -> None:
    # Linked when complete: another service that starts now cannot read a part of a token.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(TOKEN_BYTES) + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
