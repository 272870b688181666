"""The command line: `stagescope NOUN`, the same questions as the session's methods.

The service's own commands (`serve`, `stop`) join by an entry point: see `stagescope.plugins`.
"""

from __future__ import annotations

import fnmatch
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from stagescope import __version__, discovery, terminal
from stagescope.answers import Metrics, Record
from stagescope.errors import InvalidInput, NotFound
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
        click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout."),
    ):  # fmt: skip
        command = option(command)
    return command


def _read_step(_: click.Context, __: click.Parameter, value: str) -> StepWord:
    if value == "latest":
        return "latest"
    if value == "measured":
        return "measured"
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a number nor 'latest' or 'measured'"
        ) from None


def _step_argument(default: str) -> Callable[[Any], Any]:
    return click.argument(
        "step", callback=_read_step, default=default, metavar="[STEP|latest|measured]"
    )


_STEP: Final = _step_argument("latest")
# Numbers come with a step's end: without a word, the newest step that has them answers.
_MEASURED: Final = _step_argument("measured")
_RUN: Final = click.option("--run", help="Name of the run (default: the one that is live).")
_ATTEMPT: Final = click.option("--attempt", type=click.IntRange(min=1), help="Attempt's number.")
_STAGE: Final = click.option("--stage", help="Only this stage.")
_ROLE: Final = click.option("--role", help="Only this role.")
_RANK: Final = click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
_ROUND: Final = click.option("--round", type=click.IntRange(min=0), help="Only this round.")
_LIMIT: Final = click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Most rows."
)


def _session(url: str | None, token_file: Path | None, timeout: float) -> Session:
    token = None if token_file is None else discovery.read_token(token_file)
    return attach(url, token=token, timeout=timeout)


def _print(answer: Table | Metrics | Record, as_json: bool) -> None:
    if not as_json:
        terminal.show(answer)
    elif isinstance(answer, Table):
        terminal.show_json(
            {**answer.about, "truncated": answer.truncated, "rows": answer.to_dicts()}
        )
    elif isinstance(answer, Metrics):
        terminal.show_json({**answer.about, "metrics": dict(answer)})
    else:
        terminal.show_json(dict(answer))


def _question(*options: Callable[[Any], Any]) -> Callable[[_Ask], click.Command]:
    """Make a command of a function that asks a session; its docstring is the help."""

    def command(ask: _Ask) -> click.Command:
        @functools.wraps(ask)
        def run(
            *, url: str | None, token_file: Path | None, timeout: float, as_json: bool, **own: Any
        ) -> None:
            token = None if token_file is None else discovery.read_token(token_file)
            with attach(url, token=token, timeout=timeout) as session:
                _print(ask(session, **own), as_json)
            ctx = click.get_current_context()
            ctx.exit(ctx.meta.get("stagescope.exit_code", 0))

        body: Any = _connection(run)
        for option in reversed(options):
            body = option(body)
        return main.command(ask.__name__.replace("_", "-"))(body)

    return command


@_question()
def status(session: Session) -> Record:
    """Whether the service is ready; exit code 3 if not."""
    found = session.status()
    if not found.get("ready", True):
        click.get_current_context().meta["stagescope.exit_code"] = 3
    return found


@_question(_LIMIT)
def runs(session: Session, limit: int) -> Table:
    """The runs that have reported."""
    return session.runs(limit=limit)


@_question(_RUN, _LIMIT)
def attempts(session: Session, run: str | None, limit: int) -> Table:
    """A run's attempts; with --json their fingerprints."""
    return session.attempts(run, limit=limit)


@_question(_RUN, _ATTEMPT, _LIMIT)
def steps(session: Session, run: str | None, attempt: int | None, limit: int) -> Table:
    """The steps, and how complete each is."""
    return session.steps(run, attempt, limit=limit)


@_question(
    _MEASURED,
    _RUN,
    _ATTEMPT,
    _STAGE,
    _ROLE,
    _RANK,
    _ROUND,
    click.option("--only", metavar="GLOB", help="Only metrics with such a name: 'per_round/*'."),
)
def metrics(session: Session, step: StepWord, only: str | None, **place: Any) -> Metrics:
    """A step's metrics, rollout against training."""
    filters = {name: place.pop(name) for name in ("stage", "role", "rank", "round")}
    found = session.step(step, **place).metrics(**filters)
    if only is None:
        return found
    kept = {name: value for name, value in found.items() if fnmatch.fnmatchcase(name, only)}
    if not kept:
        raise NotFound(
            f"no metric of this step matches {only!r}", expected=f"one of {', '.join(found)}"
        )
    return Metrics(kept, found.about)


@_question(
    _MEASURED,
    _RUN,
    _ATTEMPT,
    _STAGE,
    _ROLE,
    _RANK,
    click.option(
        "--by", type=click.Choice(["round", "turn", "staleness"]), help="Rows [default: round]."
    ),
    _LIMIT,
)
def rounds(session: Session, step: StepWord, **options: Any) -> Table:
    """A step's mismatch round by round."""
    return _noun(session, step, options).rounds(**options)


@_question(_MEASURED, _RUN, _ATTEMPT, _STAGE, _ROLE, _RANK, _LIMIT)
def ranks(session: Session, step: StepWord, **options: Any) -> Table:
    """A step's mismatch rank by rank."""
    return _noun(session, step, options).ranks(**options)


@_question(
    _MEASURED, _RUN, _ATTEMPT, _STAGE, _ROLE, _RANK, _ROUND,
    click.option(
        "--kind", type=click.Choice(["worst", "nonfinite"]), help="Only these [default: both]."
    ),
    _LIMIT,
)  # fmt: skip
def tokens(session: Session, step: StepWord, **options: Any) -> Table:
    """A step's worst tokens, the worst first, then those that are not finite."""
    return _noun(session, step, options).tokens(**options)


@_question(_STEP, _RUN, _ATTEMPT, _STAGE, _ROLE, _RANK, _LIMIT)
def stages(session: Session, step: StepWord, **options: Any) -> Table:
    """Who was in which stage of a step, and who has not arrived."""
    return _noun(session, step, options).stages(**options)


@_question(_STEP, _RUN, _ATTEMPT, _STAGE, _ROLE, _RANK, _LIMIT)
def scalars(session: Session, step: StepWord, **options: Any) -> Table:
    """The scalars that ranks handed over in a step."""
    return _noun(session, step, options).scalars(**options)


@_question(_STEP, _RUN, _ATTEMPT, _STAGE, _ROLE, _RANK, _LIMIT)
def dumps(session: Session, step: StepWord, **options: Any) -> Table:
    """msprobe's dumps of a step: place, size and state."""
    return _noun(session, step, options).dumps(**options)


def _noun(session: Session, step: StepWord, options: dict[str, Any]) -> Step:
    return session.step(step, run=options.pop("run"), attempt=options.pop("attempt"))


@_question(_RUN, _ATTEMPT, _LIMIT)
def losses(session: Session, run: str | None, attempt: int | None, limit: int) -> Table:
    """What was announced and never arrived, with the reasons."""
    return session.losses(run, attempt, limit=limit)


@_question(_RUN, _ATTEMPT, _LIMIT)
def findings(session: Session, run: str | None, attempt: int | None, limit: int) -> Table:
    """What the service noticed to be wrong."""
    return session.findings(run, attempt, limit=limit)


@_question()
def plan(session: Session) -> Table:
    """The captures in force."""
    return session.plan()


@_question(
    click.option("--run", help="Name of the run (default: every run)."),
    click.option("--steps", required=True, metavar="5,6,10-12|all", help="Which steps."),
    click.option("--stages", required=True, metavar="NAME,...|all", help="Which stages."),
    click.option("--ranks", default="all", show_default=True, metavar="0,4-7|all"),
    click.option("--roles", metavar="NAME,...", help="Which roles (default: every role)."),
    click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="msprobe's config.json on this machine; its content travels.",
    ),
    click.option("--keep", metavar="NAME,...", help="Tensors of the payload to keep."),
)
def capture(
    session: Session,
    steps: str,
    stages: str,
    ranks: str,
    roles: str | None,
    config: Path | None,
    keep: str | None,
    run: str | None,
) -> Record:
    """Order a capture on a live run (needs the operate token)."""
    spec: dict[str, Any] = {
        "run": run,
        "steps": _ints(steps, "--steps"),
        "stages": stages if stages == "all" else _words(stages),
        "ranks": _ints(ranks, "--ranks"),
    }
    if roles:
        spec["roles"] = _words(roles)
    if config:
        spec["config"] = _json_file(config)
    if keep:
        spec["keep"] = _words(keep)
    return session.capture(**spec)


@_question(click.argument("capture_id"))
def remove_capture(session: Session, capture_id: str) -> Record:
    """Take a capture out of the plan; what it collected stays."""
    return session.remove_capture(capture_id)


_LONGEST_RANGE: Final = 100_000


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _ints(text: str, option: str) -> list[int] | str:
    """Read `5,6,10-12` or `all`."""
    if text == "all":
        return text
    found: list[int] = []
    for word in _words(text):
        first, dash, last = word.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise click.BadParameter(
                f"{word!r} is not a number, a range or 'all'", param_hint=option
            )
        ends = int(first), int(last if dash else first)
        if ends[1] < ends[0]:
            raise click.BadParameter(f"{word!r} ends before it begins", param_hint=option)
        if ends[1] - ends[0] >= _LONGEST_RANGE:
            raise click.BadParameter(f"{word!r} is too long a range", param_hint=option)
        found += range(ends[0], ends[1] + 1)
    return found


def _json_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{str(path)!r} cannot be read as JSON ({error})", expected="an msprobe config.json"
        ) from error
