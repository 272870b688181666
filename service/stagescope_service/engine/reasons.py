"""An error as the reason that the catalogue keeps."""

from __future__ import annotations

from stagescope.errors import StagescopeError


def describe(error: BaseException) -> str:
    """Return an error as one line."""
    text = str(error) if isinstance(error, StagescopeError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:1000]
