"""What the commands share: the group, the options, how a question is asked and printed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from stagescope import __version__, discovery, terminal
from stagescope.answers import Metrics, Record
from stagescope.findings import FindingRows
from stagescope.frames import Table
from stagescope.session import Session, StepName, attach
from stagescope.step import Step
from stagescope.wire.errors import InvalidInput, StagescopeError

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


_Command = TypeVar("_Command", bound=Callable[..., Any])
_Ask = Callable[..., Table | Metrics | Record]


_EPILOG: Final = "\b\nExit codes:\n" + "\n".join(
    f"  {code}  {meaning}" for code, meaning in terminal.EXIT_CODES.items()
)


@click.group(cls=Commands, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="stagescope")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Ask a running stagescope service, or start one with `stagescope serve`.

    The service is found by --url, then STAGESCOPE_URL, then the file that `serve` wrote
    (~/.stagescope/service.json); the token by --token-file, then STAGESCOPE_TOKEN, then that file.
    """


def _connection(command: _Command) -> _Command:
    """Add the options by which a service is found, and `--json`."""

    def remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta["stagescope.debug"] = True

    for option in (
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            callback=remember_debug,
            help="Show the traceback of an error.",
        ),
        click.option(
            "--timeout", type=click.FloatRange(min=0.1), default=10.0, metavar="SECONDS",
            show_default=True, help="Deadline of each call.",
        ),
        click.option(
            "--token-file", type=click.Path(path_type=Path), help="File that holds the token."
        ),
        click.option("--url", help="The service, such as http://head:8700."),
        click.option("--wide", is_flag=True, help="Every column, however wide the terminal is."),
        click.option(
            "--columns", callback=_names, metavar="A,B", help="Only these columns of a table."
        ),
        click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout."),
    ):  # fmt: skip
        command = option(command)
    return command


def _names(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    return None if value is None else words(value)


def read_step(_: click.Context, __: click.Parameter, value: str) -> StepName:
    """Read a step: a number, or a word for one."""
    if value == "latest":
        return "latest"
    if value == "measured":
        return "measured"
    if value == "captured":
        return "captured"
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a number nor 'latest', 'measured' or 'captured'"
        ) from None


def _step_argument(default: str) -> Callable[[Any], Any]:
    return click.argument(
        "step", callback=read_step, default=default, metavar="[STEP|latest|measured|captured]"
    )


STEP: Final = _step_argument("latest")
# Numbers come with a step's end: without a word, the newest step that has them answers.
MEASURED: Final = _step_argument("measured")
CAPTURED: Final = _step_argument("captured")
RUN: Final = click.option("--run", help="Name of the run (default: the one that is live).")
ATTEMPT: Final = click.option("--attempt", type=click.IntRange(min=1), help="Attempt's number.")
STAGE: Final = click.option("--stage", help="Only this stage.")
ROLE: Final = click.option("--role", help="Only this role.")
RANK: Final = click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
ROUND: Final = click.option("--round", type=click.IntRange(min=0), help="Only this round.")
PART: Final = click.option("--part", help="Only this part of the stage, such as 0.0.1.0.")
CAPTURE: Final = click.option("--capture", "capture_id", help="Only dumps of this capture.")
LIMIT: Final = click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Most rows."
)


def _print(
    answer: Table | Metrics | Record, as_json: bool, columns: list[str] | None, wide: bool
) -> None:
    if columns is not None:
        table = answer.table() if isinstance(answer, Metrics) else answer
        if not isinstance(table, Table):
            raise InvalidInput("this answer has no columns", expected="no --columns")
        answer = table.select(*columns)
    if not as_json:
        terminal.show(answer, wide=wide or columns is not None)
    elif isinstance(answer, Table):
        said = {**answer.about, "truncated": answer.truncated, "rows": answer.to_dicts()}
        if isinstance(answer, FindingRows):
            said["groups"] = answer.groups.to_dicts()
        terminal.show_json(said)
    elif isinstance(answer, Metrics):
        terminal.show_json({**answer.about, "metrics": dict(answer)})
    else:
        terminal.show_json(dict(answer))


def question(*options: Callable[[Any], Any]) -> Callable[[_Ask], click.Command]:
    """Make a command of a function that asks a session; its docstring is the help."""

    def command(ask: _Ask) -> click.Command:
        @functools.wraps(ask)
        def run(
            *,
            url: str | None,
            token_file: Path | None,
            timeout: float,
            as_json: bool,
            columns: list[str] | None,
            wide: bool,
            **own: Any,
        ) -> None:
            token = None if token_file is None else discovery.read_token(token_file)
            with attach(url, token=token, timeout=timeout) as session:
                _print(ask(session, **own), as_json, columns, wide)
            ctx = click.get_current_context()
            ctx.exit(ctx.meta.get("stagescope.exit_code", 0))

        body: Any = _connection(run)
        for option in reversed(options):
            body = option(body)
        return main.command(ask.__name__.replace("_", "-"))(body)

    return command


def noun(session: Session, step: StepName, options: dict[str, Any]) -> Step:
    """Return the step that a command asks about; its run and attempt leave the options."""
    return session.step(step, run=options.pop("run"), attempt=options.pop("attempt"))


def words(text: str) -> list[str]:
    """Read `a,b,c`."""
    return [word for part in text.split(",") if (word := part.strip())]


def text_file(path: Path) -> str:
    """Read a text; raises `InvalidInput`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{str(path)!r} cannot be read ({error})", expected="a text") from error


def json_file(path: Path) -> Any:
    """Read JSON; raises `InvalidInput`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{str(path)!r} cannot be read as JSON ({error})", expected="an msprobe config.json"
        ) from error
