"""Holds the answers of the API to its own document."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from stagescope_service.api.app import make_app
from stagescope_service.settings import Settings

try:
    import jsonschema_rs
except ImportError:  # with the lowest versions: there the answers are the same
    jsonschema_rs = None

PROBLEM = "application/problem+json"


class Operation(NamedTuple):
    """One operation of the document."""

    method: str
    path: str
    said: Mapping[str, Any]

    def matches(self, method: str, path: str) -> bool:
        pattern = re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(self.path))
        return method == self.method and re.fullmatch(pattern, path) is not None

    def schema(self, status: int, media_type: str) -> Any:
        """Return the schema of an answer; None where the document does not name it."""
        responses = self.said["responses"]
        said = responses.get(str(status)) or responses.get(f"{status // 100}XX") or {}
        return said.get("content", {}).get(media_type, {}).get("schema")


def operations(document: Mapping[str, Any]) -> Iterator[Operation]:
    """Yield every operation, literal paths before those with parameters."""
    for path in sorted(document["paths"], key=lambda path: path.count("{")):
        for method, said in document["paths"][path].items():
            yield Operation(method.upper(), path, said)


@functools.cache
def document() -> dict[str, Any]:
    """Return the document; it is the same of every app."""
    # Nothing of it is asked: the document is of the routes alone.
    nobody: Any = None
    settings = Settings(home=Path("/nonexistent"), auth=False)
    return make_app(catalogue=nobody, commands=nobody, settings=settings, tokens=None).openapi()


def check(response: httpx.Response) -> None:
    """Fail where a JSON answer is not as the document says; for the hooks of an httpx client."""
    media_type = response.headers.get("content-type", "").partition(";")[0]
    path = response.request.url.path
    operation = _operation(response.request.method, path)
    if jsonschema_rs is None or operation is None or not media_type.endswith("json"):
        return
    response.read()
    validator = _validator(operation.method, operation.path, response.status_code, media_type)
    where = f"{operation.method} {path} {response.status_code}"
    assert validator is not None, f"{where}: no schema of {media_type} in the document"
    wrong = [
        f"{'/'.join(map(str, error.instance_path))}: {error.message:.300}"
        for error in validator.iter_errors(response.json())
    ]
    assert not wrong, f"{where}: {'; '.join(wrong[:5])}"


@functools.lru_cache(maxsize=4096)
def _operation(method: str, path: str) -> Operation | None:
    return next((each for each in _operations() if each.matches(method, path)), None)


@functools.cache
def _operations() -> list[Operation]:
    return list(operations(document()))


@functools.cache
def _validator(method: str, path: str, status: int, media_type: str) -> Any:
    operation = next(each for each in _operations() if each[:2] == (method, path))
    schema = operation.schema(status, media_type)
    if schema is None:
        return None
    return jsonschema_rs.Draft202012Validator({**schema, "components": document()["components"]})
