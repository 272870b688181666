"""Registrations of long-lived engines, and the sources of their addresses.

AReaL's launcher prints `AREAL_LLM_SERVER_ADDRS=HOST:PORT[,HOST:PORT]` into its log, and its
programs read that variable.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx

from stagescope.engines.base import EngineInfo
from stagescope.engines.http import engine_url
from stagescope.wire.errors import InvalidInput, NotFound
from stagescope.wire.names import normal_run_name
from stagescope.wire.nonfinite import Json, JsonObject

AREAL_VARIABLE: Final = "AREAL_LLM_SERVER_ADDRS"
ENGINE_FIELDS: Final[Mapping[str, str]] = {
    "url": "http://HOST:PORT; without a query or a password",
    "name": "1 to 100 of A-Z a-z 0-9 . _ - (default: host and port)",
    "kind": "vllm, sglang, llama.cpp, openai",
    "model": "what it serves",
    "version": "of the engine",
    "run": "which run uses it",
    "note": "anything that people should know of it",
    "settings": "what it said of itself: an object",
}
"""The fields of a registration; only `url` is required."""
_MAX_LOG: Final = 64 << 20
_TEXT: Final = 500
_MAX_SETTINGS: Final = 50
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_ADDRESSES: Final = re.compile(rf"{AREAL_VARIABLE}=[\"']?([A-Za-z0-9._:\[\],-]+)")


def check_engine(fields: JsonObject) -> dict[str, Json]:
    """Return a registration as it is stored: a canonical URL, a name, texts or None.

    Raises:
        InvalidInput: an unknown field, or an invalid value.
    """
    unknown = sorted(set(fields) - set(ENGINE_FIELDS))
    if unknown:
        raise InvalidInput(
            f"there is no field {', '.join(map(repr, unknown))[:200]}",
            expected=f"some of {', '.join(ENGINE_FIELDS)}",
        )
    if not isinstance(fields.get("url"), str):
        raise InvalidInput("url is not given", expected=ENGINE_FIELDS["url"])
    url = engine_url(fields["url"])
    found: dict[str, Json] = {"url": url}
    for field in ("kind", "model", "version", "run", "note"):
        value = fields.get(field)
        if value is not None and not (isinstance(value, str) and len(value) <= _TEXT):
            raise InvalidInput(f"{field} is {value!r:.100}", expected=f"a text up to {_TEXT}")
        found[field] = value or None
    if found["run"] is not None:
        found["run"] = normal_run_name(found["run"])
    name = fields.get("name")
    found["name"] = engine_name(url) if name is None else check_name(name)
    settings = fields.get("settings")
    if settings is not None and not (
        isinstance(settings, Mapping) and len(settings) <= _MAX_SETTINGS
    ):
        raise InvalidInput("settings is no small object", expected=f"up to {_MAX_SETTINGS} fields")
    found["settings"] = None if not settings else dict(settings)
    return found


def check_name(name: object) -> str:
    """Return `name` if it is a valid name of an engine.

    Raises:
        InvalidInput: it is not.
    """
    if isinstance(name, str) and _NAME.match(name) and name not in {".", ".."}:
        return name
    raise InvalidInput(f"engine name {name!r:.100} is not valid", expected=ENGINE_FIELDS["name"])


def engine_name(url: str) -> str:
    """Return the default name of an engine: its host and port."""
    parsed = httpx.URL(url)
    text = f"{parsed.host}-{parsed.port or {'http': 80}.get(parsed.scheme, 443)}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:100]


def registration(info: EngineInfo) -> dict[str, Json]:
    """Return the fields of a registration from an engine's description."""
    fields = {
        field.name: getattr(info, field.name)
        for field in dataclasses.fields(info)
        if field.name not in {"kind", "place", "model", "version", "settings", "architectures"}
    }
    known = {name: value for name, value in fields.items() if value is not None}
    return {
        "url": info.place,
        "kind": info.kind,
        "model": info.model,
        "version": info.version,
        "settings": {**known, **info.settings, "architectures": list(info.architectures)},
    }


def addresses_in(text: str) -> list[str]:
    """Return the URLs in the last `AREAL_LLM_SERVER_ADDRS=` of a log."""
    found = _ADDRESSES.findall(text)
    return _urls(found[-1]) if found else []


def addresses_in_log(path: Path) -> list[str]:
    """Return the engines' URLs that a launcher printed into its log.

    Raises:
        InvalidInput: the log cannot be read.
        NotFound: it contains none (yet).
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _MAX_LOG))
            text = file.read(_MAX_LOG).decode("utf-8", "replace")
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be read ({error.strerror})") from error
    found = addresses_in(text)
    if not found:
        raise NotFound(
            f"{str(path)!r} does not say {AREAL_VARIABLE}=HOST:PORT",
            advice="the launcher prints it once its servers are up",
        )
    return found


def addresses_in_environment() -> list[str]:
    """Return the engines' URLs in `AREAL_LLM_SERVER_ADDRS`.

    Raises:
        NotFound: it is not set.
    """
    found = _urls(os.environ.get(AREAL_VARIABLE, ""))
    if not found:
        raise NotFound(
            f"no engine is named: no URL was given, and {AREAL_VARIABLE} is not set",
            expected=f"a URL, --from-log FILE, or {AREAL_VARIABLE}=HOST:PORT[,HOST:PORT]",
        )
    return found


def _urls(text: str) -> list[str]:
    return [engine_url(word) for part in text.split(",") if (word := part.strip(" '\""))]
