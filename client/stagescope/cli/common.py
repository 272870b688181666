"""Shared by all commands: the group, common options, and how an answer is requested and printed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import click

from stagescope import __version__, terminal
from stagescope.answers import Metrics, Record
from stagescope.findings import FindingRows
from stagescope.link_text import RENAMED
from stagescope.session import Session, StepName, attach
from stagescope.table import Table
from stagescope.terminal import RUN_NAME, FiniteFloat
from stagescope_wire import discovery
from stagescope_wire.errors import InvalidInput, StagescopeError
from stagescope_wire.nonfinite import Json
from stagescope_wire.versions import install_command

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "stagescope.commands"
SERVICE_COMMANDS: Final = ("serve", "stop")
"""Listed in the help even if the service's extra is not installed."""

TASKS: Final[Mapping[str, tuple[str, ...]]] = {
    "Start and stop": ("serve", "stop", "status", "token", "run", "migrate-catalogue"),
    "What went wrong": ("doctor", "findings", "finding", "lost", "stuck", "stacks", "collectives",
                        "triggers"),
    "What has reported": ("top", "runs", "attempts", "steps", "stages", "scalars"),
    "Rollout against training": ("metrics", "series", "rounds", "anatomy", "routing", "ranks",
                                 "tokens", "samples", "sample", "gradient", "weights", "canary",
                                 "devices", "exact"),
    "Capture operators": ("capture", "captures", "progress", "plan", "remove-capture"),
    "Read what was captured": ("dumps", "operators", "non-finite", "stack", "divergence",
                               "tensors"),
    "Compare and keep": ("compare", "compare-dumps", "diff", "kept", "batch", "pin", "unpin",
                         "import", "export", "convert"),
    "Send what is known": ("report", "bundle", "attach", "forward"),
    "Engines": ("engines", "consistency", "bisect"),
    "Agents": ("mcp",),
}  # fmt: skip
"""Section of the help -> its commands."""

EXTRAS: Final[Mapping[str, tuple[str, str]]] = {
    "service": ("fastapi", "the service itself (`serve`, `stop`, `attach`), and files of dumps "
                           "(`compare`, `import`, `export`, `convert`)"),
    "workers": ("ray", "in trainings that report over Ray; those that report over HTTP need none"),
    "notebook": ("polars", "figures, and answers as pandas, polars and Arrow"),
    "msprobe": ("msprobe", "in trainings: captures of operators"),
    "trackers": ("mlflow", "`forward` into TensorBoard, MLflow and OpenTelemetry"),
    "mcp": ("mcp", "`mcp`: the questions as tools of a coding agent"),
}  # fmt: skip
"""Extra -> a module that shows that the extra is installed, and what the extra is for."""


_AFTER_COMMAND: Final = frozenset(
    {
        "--attempt", "--columns", "--json", "--limit", "--run", "--timeout", "--token-file",
        "--url", "--wide",
    }
)  # fmt: skip
"""Options that most commands have."""


class CommandGroup(click.Group):
    """This package's commands and those of other packages; errors print as text, not tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every command's name."""
        return sorted({*super().list_commands(ctx), *_entry_points(), *SERVICE_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name or its earlier name, which the help does not list.

        The commands of other packages are loaded by their entry point.
        """
        if (own := super().get_command(ctx, RENAMED.get(cmd_name, cmd_name))) is not None:
            return own
        point = _entry_points().get(cmd_name)
        if point is None and cmd_name not in SERVICE_COMMANDS:
            return None
        try:
            if point is None:
                raise ModuleNotFoundError("no such package", name="stagescope_service")
            # What a command imports on use would be missed in the middle of its work.
            library = EXTRAS["service"][0]
            if point.module.startswith("stagescope_service") and not find_spec(library):
                raise ModuleNotFoundError("no such library", name=library)
            command = point.load()
        except ImportError as error:
            return _stub(cmd_name, terminal.needs_extra(error, "service"))
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the command; one of the commands' names its place."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in _AFTER_COMMAND:
                text = f"{error.option_name} stands after the command: stagescope COMMAND "
                raise click.UsageError(f"{text}{error.option_name} ...", ctx) from None
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names; click would suggest this package's only.

        Raises:
            click.UsageError: there is none; names those that are spelt alike.
        """
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = difflib.get_close_matches(name, self.list_commands(ctx))
            hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by task; commands without a task come last."""
        rest = dict.fromkeys(self.list_commands(ctx))
        for task, names in TASKS.items():
            self._write(ctx, formatter, task, [name for name in names if name in rest])
            for name in names:
                rest.pop(name, None)
        self._write(ctx, formatter, "More", [*rest])
        missing = [(n, text) for n, (module, text) in EXTRAS.items() if not find_spec(module)]
        if missing:
            with formatter.section(f"Not installed here ({install_command('NAME')})"):
                formatter.write_dl(missing)

    def _write(
        self, ctx: click.Context, formatter: click.HelpFormatter, task: str, names: list[str]
    ) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in names]
        rows = [
            (name, command.get_short_help_str(200))
            for name, command in commands
            if command and not command.hidden
        ]
        if rows:
            with formatter.section(task):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a `StagescopeError` becomes two lines on stderr and an exit code."""
        try:
            return super().invoke(ctx)
        except StagescopeError as error:
            if ctx.params.get("debug") or ctx.meta.get("stagescope.debug"):
                raise
            terminal.report(error)
            ctx.exit(terminal.exit_code(error))


def _entry_points() -> dict[str, EntryPoint]:
    from importlib import metadata  # reads mail headers: most commands are our own

    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def _stub(name: str, problem: StagescopeError) -> click.Command:
    """Return a placeholder for a command that cannot be loaded; calling it raises `problem`."""

    def refuse() -> None:
        if name != "compare":
            raise problem
        terminal.report(problem)
        click.get_current_context().exit(2)  # its 1 is "different"

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    text = f"(not installed: {install_command('service')})"
    return click.Command(
        name, callback=refuse, help=text, context_settings=settings, add_help_option=False
    )


Answer: TypeAlias = Table | Metrics | Record
Option: TypeAlias = Callable[[Callable[..., None]], Callable[..., None]]
"""A click decorator that adds an option or argument to a command."""
OptionValue: TypeAlias = Any
"""The value of an option as click parsed it, in the option's own type."""


_EPILOG: Final = "\b\nExit codes:\n" + "\n".join(
    f"  {code}  {meaning}" for code, meaning in terminal.EXIT_CODES.items()
)


@click.group(
    cls=CommandGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__, prog_name="stagescope")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Query a running stagescope service, or start one with `stagescope serve`.

    The service is found by --url, then STAGESCOPE_URL, then the file that `serve` wrote
    (~/.stagescope/service.json); the token by --token-file, then STAGESCOPE_TOKEN, then that file.
    Options stand after the command: `stagescope runs --url http://head:8700`.
    """


def _connection(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that locate the service and format its answer."""

    def remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta["stagescope.debug"] = True

    for option in (
        click.option(
            "--debug", is_flag=True, expose_value=False, callback=remember_debug,
            help="Show the traceback of an error.",
        ),
        click.option(
            "--timeout", type=FiniteFloat(min=0.1), default=10.0, metavar="SECONDS",
            show_default=True, help="Deadline of each call.",
        ),
        click.option(
            "--token-file", type=click.Path(path_type=Path), help="File that holds the token."
        ),
        click.option("--url", help="The service, such as http://head:8700."),
        click.option("--wide", is_flag=True, help="Show every column, at any width."),
        click.option(
            "--columns", callback=read_names, metavar="A,B", help="Only these columns of a table."
        ),
        click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout."),
    ):  # fmt: skip
        command = option(command)
    return command


def comma_list(text: str) -> list[str]:
    """Parse `a,b,c`."""
    return [item for part in text.split(",") if (item := part.strip())]


def read_names(_: click.Context, __: click.Parameter, value: str | None) -> list[str] | None:
    """Parse `a,b,c`; None if the option is not given."""
    return None if value is None else comma_list(value)


def read_step(_: click.Context, __: click.Parameter, value: str) -> StepName:
    """Parse a step: a number, or 'latest', 'measured' or 'captured'."""
    for word in _STEP_WORDS:
        if value == word:
            return word
    if not value.isdecimal():
        raise _wrong_step(value)
    return int(value)


def _wrong_step(text: str) -> click.BadParameter:
    return click.BadParameter(
        f"{text!r} is neither a whole number from 0 nor 'latest', 'measured' or 'captured'",
        param_hint="STEP",
    )


class _StepCommand(click.Command):
    """A command in which a negative number is a wrong step, and no option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command."""
        words = [*args]  # they are consumed
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(own.name == "step" for own in self.params) and error.option_name[1:].isdecimal():
                word = next((each for each in words if each.startswith(error.option_name)), "")
                raise _wrong_step(word or error.option_name) from None
            raise


_STEP_WORDS: Final[tuple[StepName, ...]] = ("latest", "measured", "captured")
RUN: Final = click.option(
    "--run", type=RUN_NAME, help="Name of the run (default: the last that began a stage)."
)
NAMED_RUN: Final = click.argument("named_run", type=RUN_NAME, required=False, metavar="[RUN]")
"""The same as --run; a command has both."""
ATTEMPT: Final = click.option("--attempt", type=click.IntRange(min=1), help="Attempt's number.")
STAGE: Final = click.option("--stage", help="Only this stage.")
ROLE: Final = click.option("--role", help="Only this role.")
RANK: Final = click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
ROUND: Final = click.option("--round", type=click.IntRange(min=0), help="Only this round.")
PART: Final = click.option("--part", help="Only this part of the stage, such as 0.0.1.0.")
CAPTURE: Final = click.option("--capture", "capture_id", help="Only dumps of this capture.")
FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
LIMIT: Final = click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Most rows."
)


def a_step(default: str | None = None) -> Option:
    """Return the options that name a step: STEP, --run and --attempt."""
    if default is None:
        argument = click.argument("step", callback=read_step, metavar=STEP_NAMES)
    else:
        argument = click.argument(
            "step", callback=read_step, default=default, metavar=f"[{STEP_NAMES}]"
        )
    return lambda command: argument(RUN(ATTEMPT(command)))


STEP_NUMBER: Final = click.IntRange(min=0)
STEP_NAMES: Final = "STEP|latest|measured|captured"
STEP: Final = a_step("latest")
# A step has numbers only once it has ended, so the default is the newest step with numbers.
MEASURED: Final = a_step("measured")
CAPTURED: Final = a_step("captured")


def _print(answer: Answer, as_json: bool, columns: list[str] | None, wide: bool) -> None:
    if columns is not None:
        table = answer.table() if isinstance(answer, Metrics) else answer
        if not isinstance(table, Table):
            raise InvalidInput("this answer has no columns", expected="no --columns")
        answer = table.select(*columns)
    if not as_json:
        terminal.show(answer, wide=wide or columns is not None)
    elif isinstance(answer, Table):
        fields = {**answer.about, "truncated": answer.truncated, "rows": answer.to_dicts()}
        if isinstance(answer, FindingRows):
            fields["groups"] = answer.groups.to_dicts()
        terminal.show_json(fields)
    elif isinstance(answer, Metrics):
        terminal.show_json({**answer.about, "metrics": dict(answer)})
    else:
        terminal.show_json(dict(answer))


class Question(NamedTuple):
    """A question to the service: a command, and what answers it without printing."""

    name: str
    command: click.Command
    query: Callable[..., Answer]

    def ask(self, session: Session, words: Sequence[str]) -> Answer:
        """Return the answer to the command with these words behind it.

        Raises:
            click.UsageError: the words do not fit the command.
            StagescopeError: there is no answer.
        """
        with self.command.make_context(self.name, [*words]) as context:
            own = {n: v for n, v in context.params.items() if n not in CONNECTION_OPTIONS}
            return self.query(session, **with_named_run(own))


QUESTIONS: Final[dict[str, Question]] = {}
"""Name of a command -> its question, for those who ask without a terminal."""
CONNECTION_OPTIONS: Final = frozenset(
    {"url", "token_file", "timeout", "as_json", "columns", "wide"}
)
"""Parameters of every question that locate the service or format its answer."""


def with_named_run(own: dict[str, OptionValue]) -> dict[str, OptionValue]:
    """Return parameters in which the argument RUN stands as the option --run."""
    if (named := own.pop("named_run", None)) is None:
        return own
    if own["run"] not in (None, named):
        raise InvalidInput(f"two runs are named: {named} and {own['run']}", expected="one of them")
    return {**own, "run": named}


def question(*options: Option) -> Callable[[Callable[..., Answer]], click.Command]:
    """Make a command of a function of (session, **options); its docstring is the help."""
    return lambda query: _add(query.__name__, query.__doc__ or "", query, options)


def session_command(method: Callable[..., Answer], text: str, *options: Option) -> None:
    """Make a command of a method of `Session`, with the method's parameters as options."""
    _add(method.__name__, text, method, options)


def step_command(method: Callable[..., Answer], text: str, *options: Option) -> None:
    """Make a command of a method of `Step`; STEP, MEASURED or CAPTURED is among its options."""

    def query(
        session: Session, step: StepName, run: str | None, attempt: int | None, **own: OptionValue
    ) -> Answer:
        return method(session.step(step, run=run, attempt=attempt), **own)

    _add(method.__name__, text, query, options)


def _add(
    name: str, text: str, query: Callable[..., Answer], options: Sequence[Option]
) -> click.Command:
    def run(
        *, url: str | None, token_file: Path | None, timeout: float, as_json: bool,
        columns: list[str] | None, wide: bool, **own: OptionValue,
    ) -> None:  # fmt: skip
        context = click.get_current_context()
        context.meta[terminal.IS_JSON] = as_json
        own = with_named_run(own)
        token = None if token_file is None else discovery.read_token(token_file)
        with attach(url, token=token, timeout=timeout, link_text=terminal.command_of) as session:
            _print(query(session, **own), as_json, columns, wide)
        context.exit(context.meta.get(_EXIT_CODE, 0))

    body = _connection(run)
    for option in reversed(options):
        body = option(body)
    command = main.command(name.replace("_", "-"), cls=_StepCommand, help=text)(body)
    QUESTIONS[name] = Question(name, command, query)
    return command


def set_exit_code(code: int) -> None:
    """Make the running command end with an exit code after it has printed its answer."""
    click.get_current_context().meta[_EXIT_CODE] = code


_EXIT_CODE: Final = "stagescope.exit_code"


def text_file(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InvalidInput: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{str(path)!r} cannot be read ({error})", expected="a text") from error


def json_file(path: Path) -> Json:
    """Return the JSON value in a file.

    Raises:
        InvalidInput: it cannot be read, or is not JSON.
    """
    try:
        return json.loads(text_file(path))
    except ValueError as error:
        raise InvalidInput(
            f"{str(path)!r} cannot be read as JSON ({error})", expected="an msprobe config.json"
        ) from error
