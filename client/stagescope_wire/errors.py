"""The exceptions of stagescope, in one tree.

* `StagescopeError`
    * `InvalidInput` - an argument has a wrong shape, dtype, name or value (422)
        * `InvalidTensor` - a tensor of a payload (422)
        * `InvalidEvent` - an event that cannot be read, or of an unknown schema number (422)
        * `InvalidPlan` - a plan, a capture or an msprobe configuration (422)
        * `TooLarge` - a request's body over the service's limit (413)
    * `NotFound` - no such run, attempt, step, stage or capture (404)
        * `UnknownName` - an answer has no such column, metric or field (also a `KeyError`)
    * `Unauthorized` - no token, or a wrong one (401)
    * `Forbidden` - a token that may read but not operate, or a path outside the allowed roots (403)
    * `Conflict` - the request contradicts the current state (409)
    * `TooManyRequests` - a token has sent as many as it may in a minute: retry (429)
    * `NotReady` - the service is starting, or its catalogue cannot be opened: retry (503)
    * `Unreachable` - the service, a node or an artifact cannot be reached (502)
    * `StoreError` - an operation on the catalogue or the data directory failed (500)
        * `CatalogueUnavailable` - it cannot be opened or written now (503)
    * `CaptureError` - msprobe could not be started, or broke off (500)
    * `ComparisonFailed` - dumps could not be compared, although they are not damaged (500)
    * `EngineError` - an inference engine cannot be reached or understood, or refuses (502)
    * `MissingExtra` - a library of an extra is not installed (also an `ImportError`)

Each message says what is wrong, what is expected and what to do::

    try:
        session.step(5).metrics()
    except stagescope.StagescopeError as error:
        print(error.status, error.code, error)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Final

from stagescope_wire.links import Link, LinkText, path_of, with_links

__all__ = [
    "CaptureError",
    "CatalogueUnavailable",
    "ComparisonFailed",
    "Conflict",
    "EngineError",
    "Forbidden",
    "InvalidEvent",
    "InvalidInput",
    "InvalidPlan",
    "InvalidTensor",
    "MissingExtra",
    "NotFound",
    "NotReady",
    "StagescopeError",
    "StoreError",
    "TooLarge",
    "TooManyRequests",
    "Unauthorized",
    "UnknownName",
    "Unreachable",
]


class StagescopeError(Exception):
    """Base of every error of this project; `status` is its HTTP status, `code` its stable name.

    Args:
        wrong: what is wrong.
        expected: what would be right.
        advice: what to do.
        see: the answers of the service to look at.
        link_text: returns the words for each of `see` in the error's text; by default its path.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "error"

    def __init__(
        self,
        wrong: str,
        *,
        expected: str = "",
        advice: str = "",
        see: Iterable[Link] = (),
        link_text: LinkText = path_of,
    ) -> None:
        self.wrong = wrong
        self.expected = expected
        self.advice = advice
        self.see = tuple(see)
        self.link_text = link_text
        super().__init__(wrong)

    def __str__(self) -> str:
        parts = [self.wrong]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if advice := with_links(self.advice, self.see, self.link_text):
            parts.append(advice)
        return "; ".join(parts)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Without it, an exception with keyword-only arguments cannot be unpickled (by Ray).
        parts = (self.wrong, self.expected, self.advice, self.see, self.link_text)
        return (_rebuild, (type(self), *parts))


def _rebuild(
    kind: type[StagescopeError],
    wrong: str,
    expected: str,
    advice: str,
    see: tuple[Link, ...],
    link_text: LinkText,
) -> StagescopeError:
    return kind(wrong, expected=expected, advice=advice, see=see, link_text=link_text)


class InvalidInput(StagescopeError):
    """Raised by any call with invalid arguments."""

    status = 422
    code = "invalid_input"


class InvalidTensor(InvalidInput):
    """Raised when a tensor of a payload has a wrong shape, dtype or value."""

    code = "invalid_tensor"


class InvalidEvent(InvalidInput):
    """Raised when an event cannot be read; only that event is refused."""

    code = "invalid_event"


class InvalidPlan(InvalidInput):
    """Raised when a plan, a capture or an msprobe configuration cannot be carried out."""

    code = "invalid_plan"


class TooLarge(InvalidInput):
    """Raised when a request's body is larger than the service accepts."""

    status = 413
    code = "too_large"


class NotFound(StagescopeError):
    """Raised when the requested object is not in the catalogue."""

    status = 404
    code = "not_found"


class UnknownName(NotFound, KeyError):
    """Raised when an answer has no column, metric, field or tensor of a name.

    It is a KeyError, too, so that `get` and `in` of a mapping work.
    """

    code = "unknown_name"


class Unauthorized(StagescopeError):
    """Raised when a request has no token or a wrong one."""

    status = 401
    code = "unauthorized"


class Forbidden(StagescopeError):
    """Raised when a token does not allow this, or a path is outside the allowed roots."""

    status = 403
    code = "forbidden"


class Conflict(StagescopeError):
    """Raised when a request contradicts the current state."""

    status = 409
    code = "conflict"


class TooManyRequests(StagescopeError):
    """Raised when a token has sent as many requests as it may in a minute; nothing was done."""

    status = 429
    code = "too_many_requests"


class NotReady(StagescopeError):
    """Raised while the service cannot answer yet; the call may be repeated."""

    status = 503
    code = "not_ready"


class Unreachable(StagescopeError):
    """Raised when the service, a node or an artifact cannot be reached."""

    status = 502
    code = "unreachable"


class StoreError(StagescopeError):
    """Raised when an operation on the catalogue or the data directory fails."""

    code = "store"


class CatalogueUnavailable(StoreError):
    """Raised when the catalogue cannot be opened or written at the moment."""

    status = 503
    code = "catalogue_unavailable"


class CaptureError(StagescopeError):
    """Raised, only if `strict`, when msprobe cannot be started or breaks off."""

    code = "capture"


class ComparisonFailed(StagescopeError):
    """Raised when a comparison fails, such as without memory; not for damaged files."""

    code = "comparison_failed"


class EngineError(StagescopeError):
    """Raised when an inference engine cannot be reached or understood, or refuses."""

    status = 502
    code = "engine"


class MissingExtra(StagescopeError, ImportError):
    """Raised when a call needs a library of an extra that is not installed."""

    code = "missing_extra"


def error_of_code(
    code: str, default: type[StagescopeError] = StagescopeError
) -> type[StagescopeError]:
    """Return the class with this `code`; `default` if this version has none."""
    return _BY_CODE.get(code, default)


_BY_CODE: Final[Mapping[str, type[StagescopeError]]] = {
    kind.code: kind for kind in (globals()[name] for name in __all__)
}
