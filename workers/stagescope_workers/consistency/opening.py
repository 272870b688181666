"""From `--engine` to an engine: a URL, a registered name, or one in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import stagescope
from stagescope.engines import Engine, connect
from stagescope.errors import InvalidInput

EXPECTED: Final = (
    "URL, HOST:PORT, a registered engine's name, ctranslate2:DIR, transformers[:dtype]"
)
_MOST_CONFIG: Final = 16 << 20


def open_engine(
    text: str, model: Path | None, *, key_file: Path | None = None, timeout: float = 120.0
) -> Engine:
    """Return the engine that `text` names.

    Args:
        text: see EXPECTED.
        model: the model's directory, for transformers alone.
        key_file, timeout: of an engine over HTTP.

    Raises:
        InvalidInput: it names none.
        EngineError, NotFound, MissingExtra: it cannot be opened.
    """
    kind, _, rest = text.partition(":")
    if kind == "transformers":
        if model is None:
            raise InvalidInput("transformers has no model", expected="--model DIR")
        from stagescope_workers.consistency.transformers_engine import TransformersEngine

        return TransformersEngine(model, rest or "auto")
    if kind == "ctranslate2":
        from stagescope_workers.consistency.ctranslate2_engine import CTranslate2Engine

        if not rest:
            raise InvalidInput(f"{text!r} names no directory", expected=EXPECTED)
        return CTranslate2Engine(Path(rest).expanduser())
    if "://" in text or (rest.isdecimal() and kind):
        return connect(text, key_file=key_file, timeout=timeout)
    if not text or ":" in text:
        raise InvalidInput(f"{text!r:.200} names no engine", expected=EXPECTED)
    return stagescope.engine(text, key_file=key_file, timeout=timeout)


def read_config(model: Path) -> Mapping[str, Any]:
    """Return the model's config.json.

    Raises:
        InvalidInput: there is none, or it is no object.
    """
    file = model / "config.json"
    try:
        if file.stat().st_size > _MOST_CONFIG:
            raise ValueError("too large")
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{str(file)!r} cannot be read ({error})", expected="a model directory"
        ) from error
    if not isinstance(said, dict):
        raise InvalidInput(f"{str(file)!r} is no object", expected="a model's config.json")
    return said
