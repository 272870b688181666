"""The command line's questions as tools: typed arguments from its options, the same answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import click

from stagescope import link_text
from stagescope.cli.agents.experiments import BISECT, COMPARE
from stagescope.cli.common import CONNECTION_OPTIONS, QUESTIONS, Question
from stagescope.session import Session
from stagescope.terminal import Displayable
from stagescope_wire.errors import InvalidInput
from stagescope_wire.links import Link
from stagescope_wire.names import unknown_name
from stagescope_wire.nonfinite import Json, JsonObject

READS: Final = (
    "doctor", "status", "runs", "attempts", "steps", "metrics", "series", "rounds", "anatomy",
    "routing", "ranks", "tokens", "samples", "sample", "gradient", "scalars", "stages", "findings",
    "finding", "lost", "stuck", "stacks", "weights", "canary", "devices", "exact", "dumps",
    "operators", "non_finite", "stack", "divergence", "tensors", "compare", "diff", "kept",
    "captures", "progress", "plan",
)  # fmt: skip
"""Questions that change nothing."""
CHANGES: Final = ("capture", "remove_capture", "pin", "unpin", "bisect")
"""Questions that change the live run or what the service keeps."""
_OF_THE_MACHINE: Final = frozenset({"bisect"})
"""Tools that compute where the server runs, and open what it can reach there."""
_LEFT_OUT: Final[Mapping[str, frozenset[str]]] = {
    "runs": frozenset({"delete", "yes", "rename", "hide", "show"}),
    "capture": frozenset({"wait", "wait_seconds"}),
    "progress": frozenset({"wait", "wait_seconds"}),
}
"""Tool -> options that it does not offer: those that change something, or that wait."""
_NEEDS_OPERATE: Final = "Changes the service or the live run. Needs an operate token."


@dataclasses.dataclass(frozen=True)
class Tool:
    """A question with the arguments that it takes.

    Attributes:
        name: as the command, with underscores.
        description: what it answers.
        schema: JSON Schema of its arguments.
        changes: whether it changes something.
    """

    name: str
    description: str
    schema: JsonObject
    changes: bool
    _question: Question

    def ask(self, session: Session, arguments: JsonObject) -> Displayable:
        """Return the answer.

        Raises:
            StagescopeError: the arguments are wrong, or there is no answer.
        """
        offered = [*self.schema["properties"]]
        for name in arguments:
            if name not in offered:
                raise unknown_name(name, offered, what=f"argument of {self.name}")
        given = {name: value for name, value in arguments.items() if value is not None}
        try:
            return self._question.ask(session, _words(self._question, given))
        except click.UsageError as error:
            expected = f"the arguments of the tool {self.name}"
            raise InvalidInput(error.format_message(), expected=expected) from error


def tools_of(*, operate: bool, is_remote: bool) -> dict[str, Tool]:
    """Return the tools by name, those that read first.

    Args:
        operate: whether to offer those that change something.
        is_remote: whether the agent runs on another machine, perhaps of somebody else.
    """
    questions = {**QUESTIONS, "compare": COMPARE, "bisect": BISECT}
    names = [*READS, *(CHANGES if operate else ())]
    return {
        name: _tool(questions[name], changes=name in CHANGES)
        for name in names
        if not (is_remote and name in _OF_THE_MACHINE)
    }


def command_of(link: Link) -> str:
    """Return the command that gives the answer of a link: a tool has the same name."""
    return link_text.command(link, {name.replace("_", "-") for name in READS})


def _tool(question: Question, *, changes: bool) -> Tool:
    parameters = _parameters(question)
    text = " ".join((question.command.help or "").replace("\b", "").split())
    return Tool(
        name=question.name,
        description=f"{text} {_NEEDS_OPERATE}" if changes else text,
        schema={
            "type": "object",
            "properties": {_name(each): _schema(each) for each in parameters},
            "required": [_name(each) for each in parameters if each.required],
            "additionalProperties": False,
        },
        changes=changes,
        _question=question,
    )


def _parameters(question: Question) -> list[click.Parameter]:
    """Return the parameters that a tool offers: no file of the machine on which it runs."""
    out = CONNECTION_OPTIONS | _LEFT_OUT.get(question.name, frozenset())
    names = {each.name for each in question.command.params}
    return [
        each
        for each in question.command.params
        if each.name not in out
        and not isinstance(each.type, click.Path)
        and not (each.name == "named_run" and "run" in names)
        and each.expose_value
        and not (isinstance(each, click.Option) and each.hidden)
    ]


def _name(parameter: click.Parameter) -> str:
    assert parameter.name is not None
    return parameter.name


def _schema(parameter: click.Parameter) -> JsonObject:
    """Return the JSON Schema of a parameter."""
    schema: dict[str, Json] = {**_type(parameter)}
    text = parameter.help if isinstance(parameter, click.Option) else parameter.metavar
    if text:
        schema["description"] = text
    default = parameter.default
    if isinstance(default, str | int | float) and not isinstance(default, bool):
        schema["default"] = default
    return schema


def _type(parameter: click.Parameter) -> JsonObject:
    kind = parameter.type
    if isinstance(kind, click.Choice):
        return {"type": "string", "enum": [*kind.choices]}
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return {"type": "boolean"}
    if isinstance(kind, click.IntRange) or kind is click.INT:
        low = kind.min if isinstance(kind, click.IntRange) else None
        return {"type": "integer", **({} if low is None else {"minimum": low})}
    if isinstance(kind, click.FloatRange) or kind is click.FLOAT:
        return {"type": "number"}
    if parameter.name == "step":
        return {"type": ["integer", "string"]}
    return {"type": "string"}


def _words(question: Question, given: JsonObject) -> list[str]:
    """Return arguments as the words of a command line: options first, then what has a place.

    Raises:
        InvalidInput: an argument with a place lacks the one before it.
    """
    options: list[str] = []
    places: list[str] = []
    missing: list[str] = []
    for parameter in question.command.params:
        name = _name(parameter)
        # Where RUN is an option and has a place, too, the place is for what follows it.
        value = given.get("run" if name == "named_run" else name)
        if isinstance(parameter, click.Option):
            if value is not None and value is not False:
                word = parameter.opts[-1]
                options.append(word if parameter.is_flag else f"{word}={_text(value)}")
        elif value is None:
            missing.append(name)
        elif missing:
            before = missing[0].replace("named_run", "run")
            raise InvalidInput(f"{name} is given without {before}", expected="both")
        else:
            places.append(_text(value))
    return [*options, "--", *places]


def _text(value: Json) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
