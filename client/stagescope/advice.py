"""Advice of the service in the words of its reader: API paths become commands or method calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Final, TypeAlias

AdviceFormat: TypeAlias = Callable[[str], str]
"""Rewrites the API's paths in advice for its reader."""

_PATH: Final = re.compile(
    r"(?<![\w./])(?:GET )?/(?:(?P<kind>[a-z]+)/(?P<name>[^\s/;,]+)/)?(?P<noun>[a-z-]+)"
    r"(?:\?(?P<query>\w+=[\w.-]*\w(?:&\w+=[\w.-]*\w)*))?(?![\w/?])"
)
_CAPTURE: Final = re.compile(r"(?<![\w./])(?:GET )?/captures/(?P<name>[^\s/;,]+)")
_FINDING: Final = re.compile(r"(?<![\w./])(?:GET )?/findings/(?P<name>[^\s/;,]+)")
_DIVERGENCE: Final = re.compile(r"(?<![\w./])(?:POST )?/operators/divergence\b")


def for_command_line(text: str, commands: Container[str]) -> str:
    """Return `text` with the API's paths replaced by the commands that give the same answers.

    Usage:
        >>> for_command_line("see /steps/5/stages, /losses", {"stages", "losses"})
        'see `stagescope stages 5`, `stagescope losses`'

    Args:
        text: advice.
        commands: the commands of `stagescope`; any other path is left unchanged.
    """

    def command(path: re.Match[str]) -> str:
        noun, kind, name = path["noun"], path["kind"], path["name"]
        if noun not in commands or kind not in (None, "runs", "steps"):
            return path[0]
        target = {None: "", "runs": f" --run {name}", "steps": f" {name}"}[kind]
        options = "".join(f" --{key.replace('_', '-')} {value}" for key, value in _query(path))
        return f"`stagescope {noun}{target}{options}`"

    text = _CAPTURE.sub(r"`stagescope progress \g<name>`", text)
    text = _FINDING.sub(r"`stagescope finding \g<name>`", text)
    return _PATH.sub(command, _DIVERGENCE.sub("`stagescope divergence`", text))


_OF_SESSION: Final = frozenset(
    {
        "captures", "devices", "engines", "exact", "findings", "losses", "plan", "runs", "stacks",
        "status", "steps", "triggers", "weights",
    }
)  # fmt: skip
_OF_STEP: Final = frozenset(
    {
        "dumps", "kept", "metrics", "operators", "ranks", "rounds", "scalars", "stacks", "stages",
        "stuck", "tokens", "weights",
    }
)  # fmt: skip


def for_session(text: str) -> str:
    """Return `text` with the API's paths replaced by calls of a `Session`, here `session`.

    Usage:
        >>> for_session("see /steps/5/stages, /losses")
        'see session.step(5).stages(), session.losses()'

    Args:
        text: advice; paths without a method are left unchanged.
    """

    def call(path: re.Match[str]) -> str:
        noun, kind, name = path["noun"], path["kind"], path["name"]
        arguments = [
            f"{key}={value}" if key == "attempt" else f'{key}="{value}"'
            for key, value in _query(path)
        ]
        if kind == "runs" and noun == "attempts":
            return f'session.attempts("{name}")'
        if kind == "steps" and noun in _OF_STEP:
            target = [each for each in arguments if each.startswith(("run=", "attempt="))]
            step = name if name.isdigit() else f'"{name}"'
            rest = (each for each in arguments if each not in target)
            return f"session.step({', '.join([step, *target])}).{noun}({', '.join(rest)})"
        if kind is None and noun in _OF_SESSION:
            return f"session.{noun}({', '.join(arguments)})"
        return path[0]

    text = _CAPTURE.sub(r'session.progress("\g<name>")', text)
    text = _FINDING.sub(r'session.finding("\g<name>")', text)
    return _PATH.sub(call, _DIVERGENCE.sub("session.divergence(a, b)", text))


_OF_RUN: Final = frozenset(
    {"devices", "exact", "findings", "losses", "series", "stacks", "steps", "weights"}
)
"""Nouns whose answers are of one run."""


def of_run(text: str, run: str) -> str:
    """Return `text` with the run in each of the API's paths that answer for one.

    Usage:
        >>> of_run("see /steps/5/stages, /losses?kind=dump", "a-1")
        'see /steps/5/stages?run=a-1, /losses?kind=dump&run=a-1'
    """

    return _with_argument(text, "run", run, _OF_RUN)


def of_attempt(text: str, number: int) -> str:
    """Return `text` with the attempt in each of the API's paths that answer for one.

    Usage:
        >>> of_attempt("see /steps/5/stages?run=a-1, /devices?run=a-1", 2)
        'see /steps/5/stages?run=a-1&attempt=2, /devices?run=a-1'
    """
    return _with_argument(text, "attempt", str(number), _OF_RUN - {"devices"})


def _with_argument(text: str, name: str, value: str, nouns: Container[str]) -> str:
    """Return `text` with an argument in paths of steps and of `nouns`, unless they have it."""

    def extended(path: re.Match[str]) -> str:
        query = path["query"] or ""
        is_meant = path["kind"] == "steps" or (path["kind"] is None and path["noun"] in nouns)
        if not is_meant or any(key == name for key, _ in _query(path)):
            return path[0]
        return f"{path[0]}{'&' if query else '?'}{name}={value}"

    return _PATH.sub(extended, text)


def _query(path: re.Match[str]) -> list[list[str]]:
    return [item.split("=") for item in (path["query"] or "").split("&") if item]
