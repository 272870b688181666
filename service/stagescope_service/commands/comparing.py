"""`stagescope compare` and `stagescope compare-dumps`.

Directories and files are compared in this process, without any service; a run's steps are compared
by the service that keeps them. Importing this module loads neither numba nor plotly.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias, TypedDict

import click

from stagescope import terminal
from stagescope_wire import discovery, nonfinite
from stagescope_wire.comparison_texts import as_lines
from stagescope_wire.errors import (
    ComparisonFailed,
    InvalidInput,
    StagescopeError,
    StoreError,
    Unreachable,
)
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.render import counted
from stagescope_wire.schema import read_target

if TYPE_CHECKING:
    from typing_extensions import NotRequired, Unpack

    from stagescope_service.dumps.records import Dump

_SECONDS: Final = 30.0
_COMPILING_SECONDS: Final = 5.0
"""After this time the service compiles, or what it compares is large."""
COULD_NOT: Final = 2
"""Exit status if nothing could be compared, also because of an error."""
INTERRUPTED: Final = 130
_TONES: Final[Mapping[str, JsonObject]] = {
    "title": {"bold": True}, "good": {"fg": "green"}, "bad": {"fg": "red"},
}  # fmt: skip
_Report: TypeAlias = dict[str, Json]
"""The JSON report of a comparison, from this process or from the service."""


class OutputOptions(TypedDict):
    """Options that both commands have."""

    step: int | None
    output: Path | None
    as_json: bool
    html: Path | None
    ray: bool
    everything: bool
    tolerances: tuple[str, ...]
    full: NotRequired[bool]


class CompareOptions(OutputOptions):
    """Options of `stagescope compare`."""

    url: str | None
    token_file: Path | None


class CompareDumpsOptions(OutputOptions):
    """Options of `stagescope compare-dumps`."""

    self_hosted_dir: Path
    remote_api_dir: Path | None
    weaver_dir: Path | None
    num_ranks: int | None
    num_micros: int | None


_OUTPUTS: Final = (
    click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout."),
    click.option(
        "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
        help="Write one HTML file with pictures; it needs no network.",
    ),
    click.option("--ray", is_flag=True, help="Compare shards as tasks of the Ray cluster."),
    click.option("--all", "everything", is_flag=True, help="Show everything, long lists whole."),
    click.option(
        "--tolerance", "tolerances", multiple=True, metavar="PATTERN=ATOL[,RTOL]",
        help="Tolerance for tensors whose name or section/name matches, such as "
        "'*log_probs=1e-3'. You can repeat this option.",
    ),
)  # fmt: skip


def _outputs(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OUTPUTS):
        command = option(command)
    return command


@click.command()
@click.argument("sides", nargs=-1, metavar="A B [C]")
@click.option("--step", type=click.IntRange(min=0), help="Compare only this step.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the JSON to a file as well.",
)  # fmt: skip
@click.option("--url", help="The service of the runs, such as http://head:8700.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token.")
@click.option("--full", is_flag=True, help="Also what is excluded, and every section and tensor.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of --json, and end.")
@_outputs
@click.pass_context
def compare(
    ctx: click.Context, /, sides: tuple[str, ...], schema: bool, **options: Unpack[CompareOptions]
) -> None:
    """Whether two or three dumps are the same, and where they differ first.

    A side is RUN[@ATTEMPT][:STEP] of a running service, or a directory or file. Known formats are
    kept files, a batch, NexRL, slime, AReaL, NeMo-RL, prime-rl and verl. The command compares every
    rank, microbatch and trajectory that a side has. Rows pair by sample.

    Exit status: 0 same or within noise, 1 different, 2 could not be compared.
    """
    if schema:
        from stagescope_service.compare.report import SCHEMA_FILE

        click.echo(SCHEMA_FILE.read_text(encoding="utf-8"), nl=False)
        return
    with _exit_on_error(ctx):
        if not 2 <= len(sides) <= 3:
            raise InvalidInput(
                f"{counted(len(sides), 'side')} given",
                expected=f"two or three, each of them {_FORMS}",
                advice=_example(sides),
            )
        local = [Path(side).exists() for side in sides]
        if all(local):
            report = _compare_locally(_open([Path(side) for side in sides], options), options)
        else:
            report = _compare_remotely(sides, options)
        _finish(ctx, report, options)


@click.command(name="compare-dumps")
@click.option("--self_hosted_dir", required=True, type=click.Path(path_type=Path))
@click.option("--remote_api_dir", type=click.Path(path_type=Path))
@click.option("--weaver_dir", type=click.Path(path_type=Path))
@click.option(
    "--step",
    type=click.IntRange(min=0),
    help="Compare only this step [default: every step there is].",
)
@click.option("--num_ranks", type=int, help="Checked against the ranks that are found.")
@click.option("--num_micros", type=int, help="Checked against the microbatches that are found.")
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write the report as JSON, with the keys of NexRL's.",
)  # fmt: skip
@_outputs
@click.pass_context
def compare_dumps(ctx: click.Context, /, **options: Unpack[CompareDumpsOptions]) -> None:
    """Compare NexRL's dumps: accepts the flags of its compare_debug_dumps.py.

    Exit status: 0 same or within noise, 1 different, 2 could not be compared.
    """
    directories = {
        "self_hosted_dir": options["self_hosted_dir"],
        "remote_api_dir": options["remote_api_dir"],
        "weaver_dir": options["weaver_dir"],
    }
    given = {name: path for name, path in directories.items() if path is not None}
    with _exit_on_error(ctx):
        if len(given) < 2:
            raise InvalidInput(
                "only --self_hosted_dir was given", expected="--remote_api_dir or --weaver_dir too"
            )
        dumps = dict(zip(given, _open(list(given.values()), options), strict=True))
        report = _compare_locally(list(dumps.values()), options)
        from stagescope_service.compare.report.nexrl import as_nexrl

        report = as_nexrl(report, dumps, step=options["step"], ranks=options["num_ranks"],
                          microbatches=options["num_micros"])  # fmt: skip
        _finish(ctx, report, options)


_FORMS: Final = "RUN[@ATTEMPT][:STEP], or a directory or file of dumps"
"""What a side may be."""


def _example(sides: Sequence[str]) -> str:
    """Return a call with two sides: attempts of the run that was given, if one was."""
    first = next(iter(sides), "")
    is_path = not first or Path(first).exists() or first.startswith(("/", ".", "~"))
    run = "RUN" if is_path else read_target(first).run
    return f"such as `stagescope compare {run}@1:5 {run}@2:5`"


def _compare_remotely(sides: tuple[str, ...], options: CompareOptions) -> _Report:
    """Let the service compare steps of runs, or directories in its allowed roots.

    Raises:
        InvalidInput: a side is neither a path here nor names a run.
        Unreachable: no service is known, or nothing answers there.
    """
    from stagescope.session import attach

    if options["ray"]:
        raise InvalidInput("--ray is for directories: the service compares the steps of runs")
    targets = [_target(side, options["step"]) for side in sides]
    file = options["token_file"]
    token = None if file is None else discovery.read_token(file)
    timer = threading.Timer(
        _COMPILING_SECONDS, click.echo,
        ["the service compares; its first comparison compiles for half a minute or so ..."],
        {"err": True},
    )  # fmt: skip
    timer.daemon = True
    timer.start()
    try:
        with (
            attach(
                options["url"], token=token, timeout=_SECONDS, link_text=terminal.command_of
            ) as session,
            terminal.progress("comparing", hidden=options["as_json"]) as line,
        ):
            return dict(
                session.compare(*targets, tolerances=options["tolerances"], on_wait=line.say)
            )
    except Unreachable as error:
        runs = " and ".join(
            repr(side) for side, each in zip(sides, targets, strict=True) if isinstance(each, str)
        )
        raise Unreachable(
            f"nothing here has the path {runs}, and runs need a service: {error.wrong}",
            expected=error.expected,
            advice=error.advice,
            see=error.see,
        ) from error
    finally:
        timer.cancel()


def _target(side: str, step: int | None) -> str | dict[str, str]:
    path = Path(side)
    if path.exists():
        if step is not None:
            raise InvalidInput(
                f"--step does not apply to {side!r}: beside a run, all of a directory is compared",
                expected="--step between directories alone, and RUN:STEP for a run",
                advice="`stagescope import` makes a run of a directory",
            )
        return {"directory": str(path.resolve())}
    if not side or side.startswith(("/", ".", "~")):
        raise InvalidInput(
            f"{side!r} is neither a directory or file here nor the name of a run",
            expected=_FORMS,
        )
    target = read_target(side)
    return str(target if target.step is not None else target._replace(step=step))


def _open(sides: Sequence[Path], options: OutputOptions) -> list[Dump]:
    try:
        from stagescope_service.dumps.discover import open_dump
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    with terminal.progress("listing the files", hidden=options["as_json"]):
        return [open_dump(side, step=options["step"]) for side in sides]


def _compare_locally(dumps: Sequence[Dump], options: OutputOptions) -> _Report:
    from stagescope_service.compare.comparison import compare as compare_sides
    from stagescope_service.compare.report import as_json
    from stagescope_service.compare.tolerances import Tolerances
    from stagescope_service.statistics import pairwise

    mapper = None
    if options["ray"]:
        from stagescope_service.ray_mapper import ray_tasks

        mapper = ray_tasks()
    tolerances = Tolerances.parse(options["tolerances"])
    text = "compiling, once for an installation: half a minute or so ..."
    pairwise.warm(lambda: click.echo(text, err=True))  # before the bar, which has its own line
    with _progress_bar() as update:
        return as_json(compare_sides(dumps, tolerances=tolerances, mapper=mapper, progress=update))


def _finish(ctx: click.Context, report: _Report, options: OutputOptions) -> None:
    if options["html"] is not None:
        from stagescope_service.compare.report.html import as_html

        _write(options["html"], as_html(report))
    if options["output"] is not None:
        _write(options["output"], nonfinite.dumps(report) + "\n")
    try:
        _print(report, options)
    except BrokenPipeError:  # the reader closed the pipe; the exit status is still the verdict's
        # Python flushes stdout once more at exit, and would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    ctx.exit(int(report["exit_status"]))


def _print(report: _Report, options: OutputOptions) -> None:
    if options["as_json"]:
        terminal.show_json(report)
        return
    lines = as_lines(
        report, width=terminal.width(), everything=options["everything"],
        full=options.get("full", True),
    )  # fmt: skip
    for line in lines:
        click.echo(terminal.style(line.text, **_TONES.get(line.tone, {})))
    for path in (options["html"], options["output"]):
        if path is not None:
            click.echo(f"written: {path}")


@contextmanager
def _exit_on_error(ctx: click.Context) -> Iterator[None]:
    """Report an error as every command does, and exit with COULD_NOT."""
    try:
        yield
    except (click.exceptions.Exit, click.ClickException):
        raise
    except Exception as error:  # Python's own exit status is 1, which here says that they differ
        if ctx.meta.get("stagescope.debug") or (ctx.parent and ctx.parent.params.get("debug")):
            raise
        if not isinstance(error, StagescopeError):
            error = ComparisonFailed(
                f"the comparison broke off: {type(error).__name__}: {error}",
                advice="`stagescope --debug compare ...` shows where",
            )
        terminal.report(error)
        ctx.exit(COULD_NOT)
    except KeyboardInterrupt:
        # click's own answer would be 1, which here says that they differ.
        click.echo("interrupted", err=True)
        _leave_running_tasks()
        ctx.exit(INTERRUPTED)


def _leave_running_tasks() -> None:
    """End the process now if a thread still compares: Python would wait for its whole shard.

    Nothing is open for writing before the comparison has ended.
    """
    runner = sys.modules.get("stagescope_service.compare.task_runner")  # None: nothing runs yet
    threads = [thread.name for thread in threading.enumerate()]
    if runner is not None and any(name.startswith(f"{runner.THREADS}_") for name in threads):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)


@contextmanager
def _progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=1, label="comparing", file=sys.stderr) as bar:

        def update(done: int, total: int) -> None:
            # `total` grows while tasks are added; the last step is the verdict.
            bar.length = total + 1
            if not bar.pos:  # planning is no measure of the tasks
                bar.start = bar.last_eta = time.time()
            bar.update(done - bar.pos)

        yield update
        bar.update((bar.length or 0) - bar.pos)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}") from error
