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
from stagescope.captures import LATE, read_ranks, read_steps
from stagescope.errors import InvalidInput, NotFound
from stagescope.frames import Table
from stagescope.operators import read_side
from stagescope.plugins import Commands
from stagescope.progress import Progress
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
    if value == "captured":
        return "captured"
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a number nor 'latest', 'measured' or 'captured'"
        ) from None


def _read_side(_: click.Context, __: click.Parameter, value: str) -> dict[str, Any]:
    return read_side(value)


def _step_argument(default: str) -> Callable[[Any], Any]:
    return click.argument(
        "step", callback=_read_step, default=default, metavar="[STEP|latest|measured|captured]"
    )


_STEP: Final = _step_argument("latest")
# Numbers come with a step's end: without a word, the newest step that has them answers.
_MEASURED: Final = _step_argument("measured")
_CAPTURED: Final = _step_argument("captured")
_RUN: Final = click.option("--run", help="Name of the run (default: the one that is live).")
_ATTEMPT: Final = click.option("--attempt", type=click.IntRange(min=1), help="Attempt's number.")
_STAGE: Final = click.option("--stage", help="Only this stage.")
_ROLE: Final = click.option("--role", help="Only this role.")
_RANK: Final = click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
_ROUND: Final = click.option("--round", type=click.IntRange(min=0), help="Only this round.")
_PART: Final = click.option("--part", help="Only this part of the stage, such as 0.0.1.0.")
_CAPTURE: Final = click.option("--capture", "capture_id", help="Only dumps of this capture.")
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
def stuck(session: Session, step: StepWord, **options: Any) -> Table:
    """Which ranks hold up the others, and since when."""
    return _noun(session, step, options).stuck(**options)


@_question(
    click.argument("step", required=False, metavar="[STEP|latest]"),
    _RUN,
    _ATTEMPT,
    _ROLE,
    click.option("--ranks", default="all", show_default=True, metavar="0,4-7|all"),
    click.option("--wait", default=5.0, show_default=True, help="Seconds that they may take."),
    click.option("--all-threads", is_flag=True, help="Not the training threads alone."),
)
def stacks(
    session: Session,
    step: str | None,
    ranks: str,
    wait: float,
    all_threads: bool,
    **options: Any,
) -> Record:
    """The Python stacks of live ranks, taken now (needs the operate token); with STEP, as kept."""
    only = None if ranks == "all" else read_ranks(ranks)
    if not isinstance(only, list | None):
        raise click.BadParameter(f"{ranks!r} names no ranks", param_hint="--ranks")
    if step is None:
        found = session.stacks(**options, ranks=only, wait=wait)
    else:
        word = _read_step(click.get_current_context(), click.Argument(["step"]), step)
        found = _noun(session, word, options).stacks(**options)
        found = found if only is None else found.of_ranks(only)
    return found.all_threads() if all_threads else found


@_question(_STEP, _RUN, _ATTEMPT, _STAGE, _ROLE, _RANK, _LIMIT)
def scalars(session: Session, step: StepWord, **options: Any) -> Table:
    """The scalars that ranks handed over in a step."""
    return _noun(session, step, options).scalars(**options)


@_question(_STEP, _RUN, _ATTEMPT, _STAGE, _ROLE, _RANK, _LIMIT)
def dumps(session: Session, step: StepWord, **options: Any) -> Table:
    """msprobe's dumps of a step: place, size and state."""
    return _noun(session, step, options).dumps(**options)


@_question(
    _CAPTURED, _RUN, _ATTEMPT, _STAGE, _ROLE, _RANK, _PART, _CAPTURE,
    click.option("--name", metavar="GLOB", help="Only such names: '*lm_head*', or a part of one."),
    click.option("--kind", help="Module, Functional, Torch, Tensor, ..."),
    click.option("--direction", help="forward, backward, parameters_grad, debug."),
    click.option("--section", help="input_args, output, parameters, grad, ..."),
    click.option("--dtype", help="Such as bfloat16."),
    click.option("--non-finite", is_flag=True, help="Only tensors with a NaN or an infinity."),
    _LIMIT,
)  # fmt: skip
def operators(session: Session, step: StepWord, **options: Any) -> Table:
    """What the operators did that a capture recorded, in execution order."""
    return _noun(session, step, options).operators(**options)


@_question(_CAPTURED, _RUN, _ATTEMPT, _STAGE, _ROLE, _PART, _CAPTURE, _LIMIT)
def non_finite(session: Session, step: StepWord, **options: Any) -> Table:
    """The first operator with a NaN or an infinity, on each rank and over all."""
    return _noun(session, step, options).non_finite(**options)


@_question(
    click.argument("stack_id"), _CAPTURED, _RUN, _ATTEMPT, _STAGE, _ROLE, _RANK, _PART, _CAPTURE
)
def stack(session: Session, step: StepWord, stack_id: str, **options: Any) -> Record:
    """The Python frames from which an operator was called (its `stack_id`)."""
    return _noun(session, step, options).stack(stack_id, **options)


@_question(
    click.argument("a", metavar="step=N,rank=N,...", callback=_read_side),
    click.argument("b", metavar="rank=N,...", callback=_read_side),
    click.option("--factor", type=click.FloatRange(min=0), help="Threshold in eps [default: 4]."),
    click.option("--exact", is_flag=True, help="Every number must be equal."),
    click.option("--skip-sharded", is_flag=True, help="Leave out shards."),
)
def divergence(session: Session, a: Any, b: Any, **options: Any) -> Record:
    """The first operator in which two dumps differ.

    A side is named by run, attempt, step, stage, role, rank, part and capture; what the second
    leaves out is as in the first: `stagescope divergence step=5,rank=0 rank=1`.
    """
    return session.divergence(a, b, **options)


@_question(
    click.argument("step", required=False, metavar="[STEP|latest]"),
    click.option("--version", type=int, help="The weights of this policy version."),
    _RUN,
    _ATTEMPT,
    click.option(
        "--verdict",
        type=click.Choice(
            ["differs", "missing", "replicas differ", "not comparable", "not compared", "agrees"]
        ),
        help="Only weights of this verdict.",
    ),
    _LIMIT,
)
def weights(session: Session, step: str | None, version: int | None, **options: Any) -> Table:
    """A step's weights, rollout against trainer; without STEP the versions and their verdicts."""
    if step is None:
        return session.weights(version, **options)
    if version is not None:
        raise click.UsageError("give a STEP or a --version, not both")
    word = _read_step(click.get_current_context(), click.Argument(["step"]), step)
    return _noun(session, word, options).weights(**options)


@_question(click.option("--run", help="Only this run (default: all)."), _LIMIT)
def devices(session: Session, run: str | None, limit: int) -> Table:
    """The devices whose weights were not their replicas', over attempts and runs."""
    return session.devices(run, limit=limit)


@_question(
    click.argument("a", metavar="step=N,rank=N,...", callback=_read_side),
    click.argument("b", metavar="rank=N,...", callback=_read_side),
    click.option(
        "--wait", type=click.FloatRange(min=0), default=900.0, show_default=True, metavar="SECONDS"
    ),
    _LIMIT,
)
def tensors(session: Session, a: Any, b: Any, **options: Any) -> Table:
    """How the full tensors of two dumps differ, compared by msprobe (task tensor)."""
    return session.tensors(a, b, **options)


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


@_question(
    click.argument("action", type=click.Choice(["show", "test", "set", "firings"]), default="show"),
    click.option(
        "--rules",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="YAML file of rules, to test or to set.",
    ),
    click.option("--run", help="Only of this run (test: default the live one)."),
    click.option("--steps", type=click.IntRange(min=1), help="test: newest steps [default: 1000]."),
    click.option("--defaults", is_flag=True, help="Print the rules that ship, as YAML."),
    _LIMIT,
)
def triggers(
    session: Session,
    action: str,
    rules: Path | None,
    run: str | None,
    steps: int | None,
    defaults: bool,
    limit: int,
) -> Table | Record:
    """The rules in force; `test` them, or others, on a stored run; `set` others.

    \b
    stagescope triggers                          rules, last fired, budgets, pinned steps
    stagescope triggers test --rules FILE        which stored steps would have fired
    stagescope triggers set --rules FILE         needs the operate token
    stagescope triggers firings                  what fired, and what became of its actions
    """
    if defaults:
        click.echo(session.default_triggers(), nl=False)
        click.get_current_context().exit()
    if rules is not None and action not in ("test", "set"):
        raise click.UsageError("--rules goes with `test` or `set`")
    document = None if rules is None else _text_file(rules)
    if action == "set":
        if document is None:
            raise click.UsageError("`set` needs --rules FILE")
        return session.set_triggers(document)
    if action == "test":
        return session.test_triggers(run, document, steps=steps)
    if action == "firings":
        return session.firings(run, limit=limit)
    return session.triggers(run)


@_question(
    click.argument("step", type=int),
    _RUN,
    _ATTEMPT,
)
def unpin(session: Session, step: int, run: str | None, attempt: int | None) -> Record:
    """Let the payloads of a pinned step go when room is needed (needs the operate token)."""
    return session.unpin(step, run=run, attempt=attempt)


@_question()
def plan(session: Session) -> Table:
    """The captures in force."""
    return session.plan()


_WAIT: Final = click.option(
    "--wait", is_flag=True, help="Show how far it comes until the dumps lie there."
)


@_question(
    click.option("--run", help="Name of the run (default: the one that is live)."),
    click.option(
        "--steps", default="next", show_default=True, metavar="next|N,N-N|all|next:K|every:N[,K]",
        help="Which steps: the next K, numbers, or every Nth (K times) from when all ranks know.",
    ),
    click.option("--stages", required=True, metavar="NAME,...|all", help="Which stages."),
    click.option(
        "--ranks", default="all", show_default=True, metavar="0,4-7|worst(K)|all",
        help="Which ranks; worst(K): those with the highest mismatch.",
    ),
    click.option("--roles", metavar="NAME,...", help="Which roles (default: every role)."),
    click.option("--task", help="msprobe's task [default: statistics]."),
    click.option("--level", help="msprobe's level [default: L1]."),
    click.option("--scope", metavar="FIRST,LAST", help="msprobe's scope."),
    click.option("--list", "names", metavar="NAME,...", help="msprobe's list."),
    click.option("--data-mode", metavar="WORD,...", help="msprobe's data_mode."),
    click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="msprobe's config.json on this machine instead; its content travels.",
    ),
    click.option(
        "--bench", metavar="CAPTURE_ID:STEP",
        help="An earlier capture with checksums: of task tensor only what differs is written.",
    ),
    click.option("--keep", metavar="NAME,...", help="Tensors of the payload to keep."),
    click.option("--parameters", metavar="GLOB,...", help="Parameters to keep the shards of."),
    click.option("--gradients", metavar="GLOB,...", help="... and the gradients of."),
    click.option(
        "--late", type=click.Choice(LATE), help="Ranks that do not acknowledge [default: wait]."
    ),
    click.option(
        "--late-after", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
        help="When they are late [default: 60].",
    ),
    click.option("--again", type=click.IntRange(min=0), help="Repeat a step that a rank missed."),
    click.option("--force", is_flag=True, help="Also where it is estimated to cost too much."),
    _WAIT,
)  # fmt: skip
def capture(session: Session, wait: bool, **options: Any) -> Record:
    """Order a capture on a live run (needs the operate token).

    Every rank that it asks acknowledges it first; then the step is fixed on which all start.
    """
    ordered = session.capture(**_spec(**options))
    if not wait:
        return ordered
    return _await(session, ordered["capture_id"])


@_question(click.argument("capture_id"), _WAIT)
def progress(session: Session, capture_id: str, wait: bool) -> Record:
    """How far a capture has come: who acknowledged, collected, missed or failed."""
    return _await(session, capture_id) if wait else session.progress(capture_id)


def _await(session: Session, capture_id: str) -> Progress:
    seen: set[str] = set()

    def tell(found: Progress) -> None:
        new = [line for line in (found.heading, *found.lines()) if line not in seen]
        seen.update(new)
        click.echo("\n".join(new), err=True)

    return session.wait_for(capture_id, told=tell)


def _spec(
    *, steps: str, stages: str, config: Path | None, late_after: float | None, **given: Any
) -> dict[str, Any]:
    """Return the order that the options of `capture` say."""
    spec: dict[str, Any] = {
        "steps": _steps(steps),
        "ranks": read_ranks(given.pop("ranks")),
        "stages": stages if stages == "all" else _words(stages),
        "timeout": late_after,
        "list": given.pop("names"),
        **given,
    }
    if config:
        spec["config"] = _json_file(config)
    elif not (spec["keep"] or spec["parameters"] or spec["gradients"]):
        spec["task"] = spec["task"] or "statistics"
    if spec["bench"]:
        spec["bench"] = _bench(spec["bench"])
    for name in ("roles", "scope", "list", "data_mode", "keep", "parameters", "gradients"):
        spec[name] = _words(spec[name]) if spec[name] else None
    return {name: value for name, value in spec.items() if value not in (None, False)}


def _bench(text: str) -> dict[str, Any]:
    capture_id, _, step = text.rpartition(":")
    if not capture_id or not step.isdecimal():
        raise click.BadParameter(f"{text!r} is no CAPTURE_ID:STEP", param_hint="--bench")
    return {"capture_id": capture_id, "step": int(step)}


def _steps(text: str) -> Any:
    """Read `5,8-10`, `all`, `next`, `next:3`, `every:10` or `every:10,3`."""
    word, colon, rest = text.partition(":")
    numbers = rest.split(",")
    if not colon or word not in ("next", "every"):
        return read_steps(text)
    if not all(number.isdecimal() for number in numbers) or len(numbers) > 1 + (word == "every"):
        raise click.BadParameter(f"{text!r} is no 'next:K' or 'every:N[,K]'", param_hint="--steps")
    if word == "next":
        return {"next": int(numbers[0])}
    return {"every": int(numbers[0]), "count": int(numbers[1]) if numbers[1:] else None}


@_question(click.argument("capture_id"))
def remove_capture(session: Session, capture_id: str) -> Record:
    """Take a capture out of the plan; what it collected stays."""
    return session.remove_capture(capture_id)


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


def _text_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{str(path)!r} cannot be read ({error})", expected="a text") from error


def _json_file(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{str(path)!r} cannot be read as JSON ({error})", expected="an msprobe config.json"
        ) from error
