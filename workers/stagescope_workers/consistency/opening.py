"""Options of commands that open an engine, and how it is opened."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

import stagescope
from stagescope import terminal
from stagescope_wire.engines import Engine, connect
from stagescope_wire.errors import InvalidInput

EXPECTED: Final = (
    "URL, HOST:PORT, a registered engine's name, ctranslate2:DIR, transformers[:dtype]"
)
_MAX_CONFIG_BYTES: Final = 16 << 20


class Opening(NamedTuple):
    """What engines are opened with.

    Attributes:
        model: the model's directory as transformers has it, if one is given.
        url: the service that knows engines by name; None: the one that `attach()` finds.
        key_file, timeout: options of an engine over HTTP.
    """

    model: Path | None
    url: str | None
    key_file: Path | None
    timeout: float

    def engine(self, text: str) -> Engine:
        """Return the engine that `text` names, see EXPECTED.

        Raises:
            InvalidInput: it names no engine.
            EngineError, NotFound, MissingExtra: it cannot be opened.
        """
        kind, _, rest = text.partition(":")
        if kind == "transformers":
            if self.model is None:
                raise InvalidInput("transformers has no model", expected="--model DIR")
            from stagescope_workers.consistency.transformers_engine import TransformersEngine

            return TransformersEngine(self.model, rest or "auto")
        if kind == "ctranslate2":
            from stagescope_workers.consistency.ctranslate2_engine import CTranslate2Engine

            if not rest:
                raise InvalidInput(f"{text!r} names no directory", expected=EXPECTED)
            return CTranslate2Engine(Path(rest).expanduser())
        if "://" in text or (rest.isdecimal() and kind):
            return connect(text, key_file=self.key_file, timeout=self.timeout)
        if not text or ":" in text:
            raise InvalidInput(f"{text!r:.200} names no engine", expected=EXPECTED)
        with stagescope.attach(self.url) as session:
            return session.engine(text, key_file=self.key_file, timeout=self.timeout)


def read_config(model: Path) -> Mapping[str, object]:
    """Return the model's config.json.

    Raises:
        InvalidInput: there is none, or it is not an object.
    """
    file = model / "config.json"
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError("too large")
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{str(file)!r} cannot be read ({error})", expected="a model directory"
        ) from error
    if not isinstance(config, dict):
        raise InvalidInput(f"{str(file)!r} is not an object", expected="a model's config.json")
    return config


DIRECTORY: Final = click.Path(exists=True, file_okay=False, path_type=Path)
model_option: Final = click.option(
    "--model",
    type=DIRECTORY,
    help="The model's directory as transformers has it (config.json, *.safetensors, tokenizer), "
    "with the trainer's weights.",
)
"""The option of `Opening.model`, in its place among a command's own options."""
_OPTIONS: Final = (
    click.option("--url", help="The service, such as http://head:8700, or a bundle's file."),
    click.option(
        "--key-file", type=click.Path(path_type=Path), help="File that holds the engine's key."
    ),
    click.option(
        "--timeout",
        type=terminal.FiniteFloat(min=1),
        default=120.0,
        show_default=True,
        metavar="SECONDS",
        help="Deadline of each question to an engine.",
    ),
    click.option(
        "--no-record", is_flag=True, help="Record no step, also where a service is known."
    ),
    click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout."),
)


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a command that opens engines and records what they score.

    It needs `model_option`, too. The command gets `opening`, `no_record` and `as_json`.
    """

    @functools.wraps(command)
    def with_opening(*words: Any, **options: Any) -> None:
        given = {name: options.pop(name) for name in Opening._fields}
        command(*words, opening=Opening(**given), **options)

    return functools.reduce(lambda found, option: option(found), _OPTIONS[::-1], with_opening)
