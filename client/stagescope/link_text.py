"""Links of the service in the words of their reader: commands, or calls of a session's methods."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from stagescope_wire.links import STEP_NOUNS, Link

RENAMED: Final = {"losses": "lost", "loss": "gradient"}
"""Noun of the API's paths -> the command's and the method's name, which was once the noun."""
_COMMANDS: Final = {**RENAMED, "metric_names": "series"}
"""Noun -> the command, where they differ."""


def command(link: Link, commands: Container[str]) -> str:
    """Return the command that gives the answer of a link.

    Usage:
        >>> command(Link("stages", step=5), {"stages", "lost"})
        '`stagescope stages 5`'

    Args:
        link: to the answer.
        commands: the commands of `stagescope`; a link to any other noun is shown as its path.
    """
    if link.name is not None and link.noun in _OF_ONE:
        return f"`stagescope {_OF_ONE[link.noun]} {link.name}`"
    name = _COMMANDS.get(link.noun, link.noun)
    if name not in commands or (link.name is not None and link.run is None):
        return link.path
    if link.name is not None:
        return f"`stagescope {name} {link.run} {link.name}`"
    target = "" if link.step is None else f" {link.step}"
    options = [f" --{key.replace('_', '-')} {text}" for key, text in link.arguments().items()]
    return f"`stagescope {name}{target}{''.join(options)}`"


_OF_ONE: Final = {"captures": "progress", "findings": "finding"}
"""Noun -> the command, and the method of a session, for one of them by its id."""
_OF_SESSION: Final = frozenset(
    {
        "canary", "captures", "devices", "engines", "exact", "findings", "losses", "metric_names",
        "plan", "runs", "stacks", "status", "steps", "triggers", "weights",
    }
)  # fmt: skip


def session_call(link: Link) -> str:
    """Return the call of a `Session`, here `session`, that gives the answer of a link.

    Usage:
        >>> session_call(Link("stages", step=5))
        'session.step(5).stages()'

    Args:
        link: to the answer; one to a noun without a method is shown as its path.
    """
    if link.name is not None and link.noun in _OF_ONE:
        return f'session.{_OF_ONE[link.noun]}("{link.name}")'
    if link.noun == "attempts":
        return f'session.attempts("{link.run}")'
    if link.noun == "divergence":
        return "session.divergence(a, b)"
    named = [f"version={link.name}"] if link.noun == "canary" and link.name is not None else []
    query = named + [f'{name}="{text}"' for name, text in link.query.items()]
    run = [] if link.run is None else [f'run="{link.run}"']
    target = run + ([] if link.attempt is None else [f"attempt={link.attempt}"])
    if link.step is not None and link.noun in STEP_NOUNS:
        step = str(link.step) if isinstance(link.step, int) else f'"{link.step}"'
        return f"session.step({', '.join([step, *target])}).{link.noun}({', '.join(query)})"
    if link.step is None and link.noun in _OF_SESSION:
        return f"session.{RENAMED.get(link.noun, link.noun)}({', '.join(query + target)})"
    return link.path
