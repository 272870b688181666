"""Commands that other packages add to the command line by the entry-point group `GROUP`.

So `stagescope serve` is one command among others, and the client imports nothing of the service.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

import click

from stagescope import terminal
from stagescope.errors import StagescopeError

GROUP: Final = "stagescope.commands"
SERVICE_COMMANDS: Final = ("serve", "stop")
"""Named in the help also where the service's extra is not installed."""

TASKS: Final[Mapping[str, tuple[str, ...]]] = {
    "Start and stop": ("serve", "stop", "status"),
    "What went wrong": ("findings", "finding", "losses", "stuck", "stacks", "triggers"),
    "What has reported": ("runs", "attempts", "steps", "stages", "scalars"),
    "Rollout against training": ("metrics", "series", "rounds", "ranks", "tokens", "weights",
                                 "devices", "exact"),
    "Capture operators": ("capture", "captures", "progress", "plan", "remove-capture"),
    "Read what was captured": ("dumps", "operators", "non-finite", "stack", "divergence",
                               "tensors"),
    "Compare and keep": ("compare", "compare-dumps", "diff", "kept", "batch", "pin", "unpin",
                         "import", "export", "convert"),
    "Engines": ("engines", "consistency"),
}  # fmt: skip
"""The help's sections, and the commands in each."""


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

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by what somebody wants to do; what no task names comes last."""
        left = dict.fromkeys(self.list_commands(ctx))
        for task, names in TASKS.items():
            self._write(ctx, formatter, task, [name for name in names if name in left])
            for name in names:
                left.pop(name, None)
        self._write(ctx, formatter, "More", [*left])

    def _write(
        self, ctx: click.Context, formatter: click.HelpFormatter, task: str, names: list[str]
    ) -> None:
        found = [(name, self.get_command(ctx, name)) for name in names]
        rows = [(n, each.get_short_help_str(200)) for n, each in found if each and not each.hidden]
        if rows:
            with formatter.section(task):
                formatter.write_dl(rows)

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
