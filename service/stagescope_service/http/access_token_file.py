"""The tokens of people, teams and programs: `tokens.json` of the home.

The file holds each token's SHA-256, name, role and limit of requests, never the token itself. Use
`stagescope token` to change it; a running service reads it again when it has changed. A file that
cannot be read allows nothing: the two tokens of the home remain.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from stagescope_service.background import BackgroundTasks
from stagescope_wire.errors import Conflict, Forbidden, InvalidInput, NotFound, StagescopeError
from stagescope_wire.nonfinite import JsonObject

log = logging.getLogger(__name__)

Role = Literal["read", "operate", "admin"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""The roles; each also allows what the earlier ones allow."""

TOKEN_BYTES: Final = 32
CHECK_SECONDS: Final = 1.0
"""Seconds between two looks at the file."""
LOOK_SECONDS: Final = 2.0
"""Longest wait of a request for the file, in seconds; then the tokens stay as they are."""
_MAX_BYTES: Final = 16 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PERSON: Final = re.compile(r"[A-Za-z0-9._%+@\\|:-]{1,200}")
"""Names that a proxy may give a person: an address, a name, a subject of OpenID Connect."""
_MINUTE: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """The rights of a token, or of a person that a proxy names."""

    name: str
    """Name of the person, team or program; "" for a token of the home."""
    role: Role
    sha256: str | None = dataclasses.field(default=None, repr=False)
    proxy_user: str | None = None
    """Name that a trusted proxy gives this person."""
    per_minute: int | None = None
    """Most requests a minute, without those of trainings; None: any number."""
    reports_per_minute: int | None = None
    """Most requests a minute with which a training reports; None: any number."""
    created: float | None = None
    """Unix seconds."""

    def check(self) -> Token:
        """Return the token if its fields are valid.

        Raises:
            InvalidInput: a field is not valid.
        """
        if not _NAME.fullmatch(self.name):
            raise InvalidInput(
                f"name is {self.name!r:.100}", expected="up to 64 letters, digits, '.', '_', '-'"
            )
        if self.role not in ROLES:
            raise InvalidInput(
                f"role of {self.name} is {self.role!r:.100}", expected=f"one of {', '.join(ROLES)}"
            )
        if self.proxy_user is not None and not PERSON.fullmatch(self.proxy_user):
            raise InvalidInput(
                f"proxy_user of {self.name} is {self.proxy_user!r:.200}",
                expected="letters, digits and any of . _ % + @ \\ | : -",
            )
        for limit in (self.per_minute, self.reports_per_minute):
            if limit is not None and not 1 <= limit <= 1_000_000:
                raise InvalidInput(
                    f"{self.name} may send {limit} requests a minute", expected="1 to 1000000"
                )
        return self


def token_file(home: Path) -> Path:
    """Return the path of the file."""
    return home / "tokens.json"


# --- the file ---------------------------------------------------------------------------------
def read_tokens(home: Path) -> list[Token]:
    """Return the tokens in the file of a home, in its order; none where there is no file.

    Raises:
        Forbidden: it is not a plain file of this user.
        InvalidInput: it is not such a file.
    """
    path = token_file(home)
    content = read_private(path, _MAX_BYTES)
    if content is None:
        return []
    try:
        tokens = [_parse(fields) for fields in json.loads(content)["tokens"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{path} is not a file of tokens ({type(error).__name__})",
            expected="what `stagescope token` writes",
        ) from error
    for names in ([each.name for each in tokens], [each.proxy_user for each in tokens]):
        named = [name for name in names if name is not None]
        if len(named) != len(set(named)):
            raise InvalidInput(f"{path} names a token or a person twice", expected="each once")
    return tokens


def read_private(path: Path, most: int) -> bytes | None:
    """Return the first bytes of a file that its user alone may read; None: there is no file.

    A file that others could read is closed to them.

    Raises:
        Forbidden: it is not a plain file of this user.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Forbidden(
            f"{path} cannot be read ({error.strerror})", expected="a plain file of this user"
        ) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise Forbidden(
                f"{path} is not a plain file of this user",
                expected=f"a file of user {os.geteuid()}",
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            log.warning("%s was readable by others: its mode is now 0600", path)
            os.fchmod(file.fileno(), 0o600)
        return file.read(most)


def _parse(fields: Mapping[str, object]) -> Token:
    """Return a token; a field that this version does not know might restrict it, and is refused."""
    known = {field.name: fields.get(field.name) for field in dataclasses.fields(Token)}
    unknown = {name for name, value in fields.items() if value is not None} - known.keys()
    if unknown:
        raise InvalidInput(f"a token has the unknown fields {sorted(unknown)!r:.200}")
    texts, numbers = ("sha256", "proxy_user"), ("per_minute", "reports_per_minute")
    if not isinstance(known["name"], str) or not isinstance(known["role"], str):
        raise TypeError("name")
    if any(not isinstance(known[name], str | None) for name in texts):
        raise TypeError("sha256")
    if any(not isinstance(known[name], int | None) for name in numbers):
        raise TypeError("per_minute")
    return Token(**known).check()  # type: ignore[arg-type]


@contextlib.contextmanager
def _changed(home: Path) -> Iterator[list[Token]]:
    """Yield the tokens, and write the block's changes; one process at a time."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = token_file(home)
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tokens = read_tokens(home)
        yield tokens
        rows = [dataclasses.asdict(token.check()) for token in tokens]
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            json.dump({"tokens": rows}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        os.close(lock)


def add_token(home: Path, token: Token) -> str | None:
    """Add a token and return it; None for a person that a proxy names, who needs none.

    Raises:
        Conflict: there is one of this name, or for this person.
        InvalidInput: it cannot be used.
    """
    text = None if token.proxy_user is not None else secrets.token_urlsafe(TOKEN_BYTES)
    with _changed(home) as tokens:
        for other in tokens:
            is_same_person = token.proxy_user is not None and other.proxy_user == token.proxy_user
            if other.name == token.name or is_same_person:
                raise Conflict(
                    f"there is a token {other.name} already",
                    advice="`stagescope token rotate` replaces it, `token remove` removes it",
                )
        hashed = None if text is None else _sha256(text)
        tokens.append(dataclasses.replace(token, sha256=hashed, created=time.time()))
    return text


def rotate_token(home: Path, name: str) -> str:
    """Replace a token by another with the same rights, and return that.

    Raises:
        NotFound: there is none of this name.
        InvalidInput: it is a person that a proxy names.
    """
    text = secrets.token_urlsafe(TOKEN_BYTES)
    with _changed(home) as tokens:
        at = _find(tokens, name)
        if tokens[at].proxy_user is not None:
            raise InvalidInput(
                f"{name} is the name of a proxy's user", expected="a name that has a token"
            )
        tokens[at] = dataclasses.replace(tokens[at], sha256=_sha256(text), created=time.time())
    return text


def remove_token(home: Path, name: str) -> None:
    """Remove a token.

    Raises:
        NotFound: there is none of this name.
    """
    with _changed(home) as tokens:
        del tokens[_find(tokens, name)]


def _find(tokens: Sequence[Token], name: str) -> int:
    names = [token.name for token in tokens]
    if name not in names:
        expected = f"one of {', '.join(names)}" if names else "no token exists yet"
        raise NotFound(f"there is no token {name!r:.100}", expected=expected)
    return names.index(name)


# --- in a service -----------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, slots=True)
class TokenTable:
    """The tokens of a file, by what a request presents."""

    by_name: Mapping[str, Token]
    by_sha256: Mapping[str, Token]
    by_person: Mapping[str, Token]
    by_login: Mapping[str, Token]
    """By the SHA-256 of the cookie's value, so that the time of a lookup tells nothing about it."""


class TokenFile:
    """The tokens of a home in a service that runs; reads them again when the file has changed.

    Args:
        home: of the service.
        login_key: key of the cookies' values; the file alone is not enough to make one.
        clock: monotonic seconds.
    """

    def __init__(
        self, home: Path, login_key: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._home = home
        self._path = str(token_file(home))
        self._key = login_key.encode()
        self._clock = clock
        self._checked = -math.inf
        self._tasks = BackgroundTasks()
        self._looking: asyncio.Task[None] | None = None
        self._mark: tuple[int, ...] | None = None
        self._table = self._index([])

    @property
    def table(self) -> TokenTable:
        """The tokens as they were when the file was last read."""
        return self._table

    async def look(self) -> None:
        """Read the file again where it changed, unless that was done `CHECK_SECONDS` ago.

        It is read in a thread: a home on a disk that hangs must not stop the event loop. If the
        disk takes longer than `LOOK_SECONDS`, the tokens stay as they were.
        """
        if self._clock() - self._checked < CHECK_SECONDS:
            return
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.start(asyncio.to_thread(self.read))
        done, _ = await asyncio.wait([self._looking], timeout=LOOK_SECONDS)
        if not done:
            self._checked = self._clock()
            log.error("%s was not read within %.0f s", self._path, LOOK_SECONDS)
        for task in done:
            task.result()

    def read(self) -> None:
        """Read the file again where it changed."""
        now = self._clock()
        mark = self._stat()
        if mark != self._mark:
            self._table = self._read()
            self._mark = mark
        self._checked = now

    def login(self, token: Token) -> str:
        """Return the cookie value of a browser that presented a token."""
        text = f"login {token.name} {token.sha256}"
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()

    def _stat(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return None
        return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)

    def _read(self) -> TokenTable:
        try:
            return self._index(read_tokens(self._home))
        except (StagescopeError, OSError) as error:
            log.error("no token of %s is valid: %s", self._path, error)
            return self._index([])

    def _index(self, tokens: Sequence[Token]) -> TokenTable:
        own = [token for token in tokens if token.sha256 is not None]
        return TokenTable(
            by_name={token.name: token for token in tokens},
            by_sha256={token.sha256 or "": token for token in own},
            by_person={token.proxy_user: token for token in tokens if token.proxy_user},
            by_login={_sha256(self.login(token)): token for token in own},
        )


def of_secret(table: Mapping[str, Token], text: str) -> Token | None:
    """Return the token that is stored under the SHA-256 of a text."""
    return table.get(_sha256(text))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


# --- limits -----------------------------------------------------------------------------------
class RateLimits:
    """Counts the requests of tokens that have a limit; for one event loop.

    A token may send as many at once as in a minute: then each minute's share comes back evenly.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free: dict[tuple[str, bool], float] = {}
        """(name, whether for reports) -> time when all requests so far are worked off."""

    def wait(self, token: Token, *, is_report: bool) -> int:
        """Count a request; return 0, or the seconds after which it may be sent again."""
        limit = token.reports_per_minute if is_report else token.per_minute
        if limit is None:
            return 0
        now, share = self._clock(), _MINUTE / limit
        free = max(now, self._free.get((token.name, is_report), now))
        over = free + share - now - _MINUTE
        if over > 1e-9:
            return math.ceil(over)
        self._free[token.name, is_report] = free + share
        return 0


def describe(token: Token) -> JsonObject:
    """Return a token for its list: without its hash."""
    fields = dataclasses.asdict(token)
    del fields["sha256"]
    return fields
