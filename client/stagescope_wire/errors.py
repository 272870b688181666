"""The exceptions of stagescope; `StagescopeError` is the base of all.

Each message says what is wrong, what was expected and what to do::

    try:
        session.step(5).metrics()
    except stagescope.StagescopeError as error:
        print(error.status, error.code, error)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

from stagescope_wire.links import Link, LinkText, path_of, with_links

__all__ = [
    "CaptureError", "CatalogueUnavailable", "ComparisonFailed", "Conflict", "EngineError",
    "Forbidden", "InvalidEvent", "InvalidInput", "InvalidPlan", "InvalidTensor", "MissingExtra",
    "NotFound", "NotMeasured", "NotReady", "StagescopeError", "StoreError", "TooLarge",
    "TooManyRequests", "Unauthorized", "UnknownName", "Unreachable",
]  # fmt: skip


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
    reason: ClassVar[str] = ""
    """Stable name of one reason of the code, where a program acts on it."""

    def __init_subclass__(cls, *, code: str = "", status: int = 0) -> None:
        super().__init_subclass__()
        cls.code = code or cls.code
        cls.status = status or cls.status

    def __init__(
        self, wrong: str, *, expected: str = "", advice: str = "", see: Iterable[Link] = (),
        link_text: LinkText = path_of,
    ) -> None:  # fmt: skip
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
        names = ("expected", "advice", "see", "link_text")
        return _rebuild, (type(self), self.wrong, {name: getattr(self, name) for name in names})


def _rebuild(kind: type[StagescopeError], wrong: str, fields: Mapping[str, Any]) -> StagescopeError:
    return kind(wrong, **fields)


class InvalidInput(StagescopeError, code="invalid_input", status=422):
    """Raised by any call with invalid arguments."""


class InvalidTensor(InvalidInput, code="invalid_tensor"):
    """Raised when a tensor of a payload has a wrong shape, dtype or value."""


class InvalidEvent(InvalidInput, code="invalid_event"):
    """Raised when an event cannot be read; only that event is refused."""


class InvalidPlan(InvalidInput, code="invalid_plan"):
    """Raised when a plan, a capture or an msprobe configuration cannot be carried out."""


class TooLarge(InvalidInput, code="too_large", status=413):
    """Raised when a request's body is larger than the service accepts."""


class NotFound(StagescopeError, code="not_found", status=404):
    """Raised when the requested object is not in the catalogue."""


class NotMeasured(NotFound):
    """Raised by the service when a step has no numbers (yet); clients raise `NotFound`."""

    reason = "not_measured"


class UnknownName(NotFound, KeyError, code="unknown_name"):
    """Raised when an answer has no column, metric, field or tensor of a name.

    It is a KeyError, too, so that `get` and `in` of a mapping work.
    """


class Unauthorized(StagescopeError, code="unauthorized", status=401):
    """Raised when a request has no token or a wrong one."""


class Forbidden(StagescopeError, code="forbidden", status=403):
    """Raised when a token does not allow this, or a path is outside the allowed roots."""


class Conflict(StagescopeError, code="conflict", status=409):
    """Raised when a request contradicts the current state."""


class TooManyRequests(StagescopeError, code="too_many_requests", status=429):
    """Raised when a token has sent as many requests as it may in a minute; nothing was done."""


class NotReady(StagescopeError, code="not_ready", status=503):
    """Raised while the service cannot answer yet; the call may be repeated."""


class Unreachable(StagescopeError, code="unreachable", status=502):
    """Raised when the service, a node or an artifact cannot be reached."""


class StoreError(StagescopeError, code="store"):
    """Raised when an operation on the catalogue or the data directory fails."""


class CatalogueUnavailable(StoreError, code="catalogue_unavailable", status=503):
    """Raised when the catalogue cannot be opened or written at the moment."""


class CaptureError(StagescopeError, code="capture"):
    """Raised, only if `strict`, when msprobe cannot be started or breaks off."""


class ComparisonFailed(StagescopeError, code="comparison_failed"):
    """Raised when a comparison fails, such as without memory; not for damaged files."""


class EngineError(StagescopeError, code="engine", status=502):
    """Raised when an inference engine cannot be reached or understood, or refuses."""


class MissingExtra(StagescopeError, ImportError, code="missing_extra"):
    """Raised when a call needs a library of an extra that is not installed."""


_BY_CODE: Final[Mapping[str, type[StagescopeError]]] = {
    kind.code: kind for kind in (globals()[name] for name in __all__) if not kind.reason
}


def error_of_code(
    code: str, default: type[StagescopeError] = StagescopeError
) -> type[StagescopeError]:
    """Return the class with this `code`; `default` if this version has none."""
    return _BY_CODE.get(code, default)
