"""Commands that other packages add to the command line by the entry-point group `GROUP`.

So `stagescope serve` is one command among others, and the client imports nothing of the service.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any, Final

import click

from stagescope import terminal
from stagescope.errors import StagescopeError

GROUP: Final = "stagescope.commands"
SERVICE_COMMANDS: Final = ("serve", "stop")
"""Named in the help also where the service's extra is not installed."""


class Commands(click.Group):
    """This module's commands and those that other packages add; errors as lines, not traces."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every command's name."""
        return sorted({*super().list_commands(ctx), *_entry_points(), *SERVICE_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, loaded from its package if it is not of this one."""
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        point = _entry_points().get(cmd_name)
        if point is None and cmd_name not in SERVICE_COMMANDS:
            return None
        try:
            if point is None:
                raise ModuleNotFoundError("no such package", name="stagescope_service")
            command = point.load()
        except ImportError as error:
            return _stub(cmd_name, terminal.needs_extra(error, "service"))
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of this project becomes two lines and an exit code."""
        try:
            return super().invoke(ctx)
        except StagescopeError as error:
            if ctx.params.get("debug") or ctx.meta.get("stagescope.debug"):
                raise
            terminal.report(error)
            ctx.exit(terminal.exit_code(error))


def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _stub(name: str, problem: StagescopeError) -> click.Command:
    """Return a command that stands for one that cannot be loaded, and says why when called."""

    def refuse() -> None:
        raise problem

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    text = "(not installed: pip install 'stagescope[service]')"
    return click.Command(
        name, callback=refuse, help=text, context_settings=settings, add_help_option=False
    )
