"""Reads a trainer's configuration: the run's name, and settings without what may be secret."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from stagescope_wire.nonfinite import Json
from stagescope_workers.probe.identity import has_password, hide, is_secret, visible_arguments

T = TypeVar("T")
_MIN_SECRET_LENGTH: Final = 8
MAX_LEAVES: Final = 990


def named_run(name: str, *, fallback: str) -> str:
    """Return STAGESCOPE_RUN, else `name`, else `fallback`: a text, which `init` normalises."""
    return os.environ.get("STAGESCOPE_RUN") or name or fallback


def lookup(node: Any, *path: str) -> Any:
    """Return the value at a path of keys or attributes, or None."""
    for name in path:
        if node is None:
            return None
        try:
            node = node.get(name) if hasattr(node, "get") else getattr(node, name, None)
        except Exception:  # OmegaConf raises its own errors for failed interpolations
            return None
    return node


def present(fields: Mapping[str, T | None]) -> dict[str, T]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def sampling(node: object, prefix: str = "") -> dict[str, object]:
    """Return how tokens are sampled, as far as a configuration, or a trainer, says."""
    names = ("temperature", "top_p", "top_k")
    return present({name: lookup(node, f"{prefix}{name}") for name in names})


def attempt_key() -> str | None:
    """Return STAGESCOPE_ATTEMPT; None means Ray's session and job."""
    return os.environ.get("STAGESCOPE_ATTEMPT") or None


def plain_leaves(tree: Mapping[object, object]) -> dict[str, object]:
    """Return `visible_leaves` in which everything but numbers, texts and lists is a text."""
    kept = (str, int, float, list, type(None))
    leaves = visible_leaves(tree).items()
    return {name: value if isinstance(value, kept) else str(value) for name, value in leaves}


def to_container(node: object) -> Json:
    """Return an OmegaConf node as built-in types, with interpolations resolved where possible."""
    if node is None or isinstance(node, dict):
        return node
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    try:
        return OmegaConf.to_container(node, resolve=True)
    except Exception:  # a '???', or an interpolation that fails
        return OmegaConf.to_container(node, resolve=False)


def visible_leaves(tree: Mapping[object, object]) -> dict[str, object]:
    """Return the first MAX_LEAVES leaves of a tree by dotted name, without possible secrets."""
    secrets = {
        value
        for variable, value in os.environ.items()
        if is_secret(variable) and len(value) >= _MIN_SECRET_LENGTH
    }
    found: dict[str, object] = {}
    for name, value in _leaves(tree, ""):
        texts = [text for text in _as_list(value) if isinstance(text, str)]
        if texts and is_secret(name):
            continue
        if any(has_password(text) or text in secrets for text in texts):
            continue
        # An argument may itself be an option: --api-key=x
        if isinstance(value, str):
            found[name] = hide(value)
        else:
            found[name] = visible_arguments(texts) if texts == value else value
    return dict(sorted(found.items())[:MAX_LEAVES])


def _leaves(tree: Json, prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if isinstance(value, Mapping) or any(
            isinstance(item, Mapping | list | tuple) for item in _as_list(value)
        ):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def absolute(path: object) -> str | None:
    """Return a path that does not depend on the working directory; None for no path."""
    return str(Path(path).expanduser().absolute()) if isinstance(path, str) and path else None
