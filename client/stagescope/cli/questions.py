"""What the commands share: the group, the options, how a question is asked and printed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from stagescope import __version__, discovery, terminal
from stagescope.answers import Metrics, Record
from stagescope.errors import InvalidInput
from stagescope.findings import Noticed
from stagescope.frames import Table
from stagescope.plugins import Commands
from stagescope.session import Session, StepWord, attach
from stagescope.step import Step

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


def read_step(_: click.Context, __: click.Parameter, value: str) -> StepWord:
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
        if isinstance(answer, Noticed):
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


def noun(session: Session, step: StepWord, options: dict[str, Any]) -> Step:
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
