"""Commands that change a live run: captures with their progress, and triggers."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

import click

from stagescope import terminal
from stagescope.answers import Record
from stagescope.capture_requests import UNKNOWN_SECONDS
from stagescope.cli.common import (
    FILE,
    LIMIT,
    RUN,
    OptionValue,
    comma_list,
    json_file,
    question,
    session_command,
    set_exit_code,
    text_file,
)
from stagescope.progress import CaptureProgress, RequestedCapture
from stagescope.session import Session
from stagescope.table import Table
from stagescope.terminal import RUN_NAME, FiniteFloat
from stagescope_wire.captures import LATE, read_ranks, read_steps
from stagescope_wire.errors import InvalidInput
from stagescope_wire.nonfinite import Json
from stagescope_wire.render import printable

session_command(Session.plan, "The active captures; with --run those that apply to it.", RUN)
session_command(
    Session.captures, "All captures that were ever requested, also ended and withdrawn ones.",
    click.option("--run", type=RUN_NAME, help="Only those requested for this run."), LIMIT,
)  # fmt: skip

_WITHDRAWN: Final = ("capture_id", "run", "state", "stages", "steps", "ranks", "by")
_WAIT: Final = click.option(
    "--wait", is_flag=True,
    help="Show the progress until the capture has ended, or no requested rank has reported for a "
    "minute.",
)  # fmt: skip
_WAIT_SECONDS: Final = click.option(
    "--wait-seconds", type=FiniteFloat(min=0), metavar="SECONDS",
    help="--wait for so long at most, also for a run that has yet to report.",
)  # fmt: skip


class _StageNames(click.types.StringParamType):
    """Names of stages; without any, the error says where they are listed."""

    name = "text"

    def get_missing_message(
        self, param: click.Parameter, ctx: click.Context | None = None
    ) -> str | None:
        """Return what to give."""
        del param, ctx
        return "Give names, such as actor_update, or all: `stagescope stages` lists them"


@question(
    RUN,
    click.option(
        "--steps", default="next", show_default=True, metavar="next|N,N-N|all|next:K|every:N[,K]",
        help="Which steps: the next K, numbers, or every Nth (K times) from the agreed step.",
    ),
    click.option(
        "--stages", type=_StageNames(), required=True, metavar="NAME,...|all", help="Which stages."
    ),
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
        "--config", type=FILE,
        help="msprobe's config.json on this machine instead; its content is sent.",
    ),
    click.option(
        "--bench", metavar="CAPTURE_ID:STEP",
        help="An earlier capture with checksums: task tensor then writes only what differs.",
    ),
    click.option("--keep", metavar="NAME,...", help="Recorded tensors or sections to keep."),
    click.option("--parameters", metavar="GLOB,...", help="Parameters to keep the shards of."),
    click.option("--gradients", metavar="GLOB,...", help="... and the gradients of."),
    click.option(
        "--late", type=click.Choice(LATE),
        help="What to do about ranks that do not acknowledge [default: wait].",
    ),
    click.option(
        "--late-after", type=FiniteFloat(min=0, min_open=True), metavar="SECONDS",
        help="Time to acknowledge [default: 60].",
    ),
    click.option("--again", type=click.IntRange(min=0),
                 help="How often to agree again after a rank missed a step."),
    click.option("--force", is_flag=True, help="Start even if the estimated cost is too high, "
                 "a stage seems to be misspelt, or the steps closed in an ended attempt."),
    _WAIT,
    _WAIT_SECONDS,
)  # fmt: skip
def capture(
    session: Session, wait: bool, wait_seconds: float | None, **options: OptionValue
) -> Record:
    """Request a capture on a live run (needs the operate token).

    Every requested rank acknowledges it first; then the step is fixed on which all of them start.
    """
    requested = session.capture(**_spec(**options))
    for text in requested.warnings:
        label = terminal.style("warning:", fg="yellow", err=True)
        click.echo(f"{label} {printable(text)}", err=True)
    if not wait and wait_seconds is None:
        return _Warned(requested)
    for note in requested.remarks:
        click.echo(printable(f"note: {note}"), err=True)
    return _wait_for(session, requested["capture_id"], wait_seconds)


class _Warned(RequestedCapture):
    """A requested capture whose warnings are on stderr."""

    __slots__ = ()

    @property
    def warnings(self) -> list[str]:
        """None: they were printed."""
        return []


@question(click.argument("capture_id"), _WAIT, _WAIT_SECONDS)
def progress(session: Session, capture_id: str, wait: bool, wait_seconds: float | None) -> Record:
    """The progress of a capture: which ranks acknowledged, collected, missed or failed."""
    if not wait and wait_seconds is None:
        return session.progress(capture_id)
    return _wait_for(session, capture_id, wait_seconds)


def _wait_for(session: Session, capture_id: str, timeout: float | None) -> CaptureProgress:
    seen: set[str] = set()
    withdraw = f"`stagescope remove-capture {capture_id}` withdraws it"

    def print_new_lines(found: CaptureProgress) -> None:
        if found.ended:
            return  # it is the answer
        new = [line for line in (found.heading, *found.lines()) if line not in seen]
        seen.update(new)
        click.echo("\n".join(new), err=True)

    try:
        final = session.wait_for(capture_id, timeout=timeout, told=print_new_lines)
    except KeyboardInterrupt:
        click.echo(f"\nthe request stays: {withdraw}", err=True)
        raise
    if not final.ended:
        if final.is_abandoned:
            text = "no requested rank is alive"
        elif timeout is None:
            text = f"no requested rank has reported for {UNKNOWN_SECONDS:g} s"
        else:
            text = f"the capture has not ended after {timeout:g} s"
        longer = f"`stagescope progress {capture_id} --wait-seconds N` waits longer, {withdraw}"
        click.echo(printable(f"{text}. The request stays: {longer}"), err=True)
    if final["state"] != "complete":
        set_exit_code(1)
    return _Rest(final, seen) if terminal.shows_both() else final


class _Rest(CaptureProgress):
    """The final progress for a terminal that shows the lines of before already."""

    __slots__ = ("_seen",)

    def __init__(self, final: CaptureProgress, seen: Collection[str]) -> None:
        super().__init__(final)
        self._seen = seen

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the lines that were not shown yet."""
        return [line for line in super().lines(width=width) if line not in self._seen]


def _spec(
    *, steps: str, stages: str, config: Path | None, late_after: float | None, ranks: str,
    names: str | None, bench: str | None, **others: OptionValue,
) -> dict[str, Json]:  # fmt: skip
    """Return the capture request of the options of `capture`."""
    spec: dict[str, Json] = {
        "steps": _steps(steps),
        "ranks": read_ranks(ranks),
        "stages": stages if stages == "all" else comma_list(stages),
        "timeout": late_after,
        "list": names,
        "config": json_file(config) if config else None,
        "bench": _bench(bench) if bench else None,
        **others,
    }
    for name in ("roles", "scope", "list", "data_mode", "keep", "parameters", "gradients"):
        if spec[name] is None:
            continue
        spec[name] = comma_list(str(spec[name]))
        if not spec[name]:  # of an unset variable of the shell
            option = name.replace("_", "-")
            raise click.BadParameter("it names nothing", param_hint=f"--{option}")
    return {name: value for name, value in spec.items() if value not in (None, False)}


def _bench(text: str) -> dict[str, str | int]:
    capture_id, _, step = text.rpartition(":")
    if not capture_id or not step.isdecimal():
        raise click.BadParameter(f"{text!r} is not CAPTURE_ID:STEP", param_hint="--bench")
    return {"capture_id": capture_id, "step": int(step)}


def _steps(text: str) -> Json:
    """Parse `5,8-10`, `all`, `next`, `next:3`, `every:10` or `every:10,3`."""
    kind, colon, rest = text.partition(":")
    numbers = rest.split(",")
    if not colon or kind not in ("next", "every"):
        try:
            return read_steps(text)
        except InvalidInput:
            expected = "numbers such as 5,8-10, 'all', 'next', 'next:K' or 'every:N[,K]'"
            problem = f"{text!r:.100} is not of its forms: {expected}"
            raise click.BadParameter(problem, param_hint="--steps") from None
    if not all(number.isdecimal() for number in numbers) or len(numbers) > 1 + (kind == "every"):
        raise click.BadParameter(f"{text!r} is not 'next:K' or 'every:N[,K]'", param_hint="--steps")
    if kind == "next":
        return {"next": int(numbers[0])}
    return {"every": int(numbers[0]), "count": int(numbers[1]) if numbers[1:] else None}


@question(click.argument("capture_id"))
def remove_capture(session: Session, capture_id: str) -> Record:
    """Withdraw a capture from the plan; its dumps are kept."""
    removed = session.remove_capture(capture_id)
    fields = {name: removed.get(name) for name in _WITHDRAWN if removed.get(name) is not None}
    return Record({**fields, "capture_id": capture_id}, title=removed.heading)


def _set_rules(session: Session, document: str) -> Table:
    before = {str(row["name"]) for row in session.triggers()}
    session.set_triggers(document)
    found = session.triggers()
    if gone := sorted(before - {str(row["name"]) for row in found}):
        text = f"no longer active: {', '.join(gone)} (the default rules: triggers --defaults)"
        click.echo(printable(text), err=True)
    return found


@question(
    click.argument("action", type=click.Choice(["show", "test", "set", "firings"]), default="show"),
    click.argument("rule", required=False),
    click.option("--rules", type=FILE, help="YAML file of rules, to test or to set."),
    click.option("--run", type=RUN_NAME, help="Only of this run (test: default the live one)."),
    click.option("--steps", type=click.IntRange(min=1), help="test: newest steps [default: 1000]."),
    click.option("--defaults", is_flag=True, help="Print the default rules as YAML."),
    click.option("--only", metavar="RULE,...", help="firings: only of these rules."),
    LIMIT,
)
def triggers(
    session: Session, action: str, rule: str | None, rules: Path | None, run: str | None,
    steps: int | None, defaults: bool, only: str | None, limit: int,
) -> Table | Record:  # fmt: skip
    """The active rules; `test` rules on a stored run, or a webhook; `set` other rules.

    \b
    stagescope triggers                          rules, last firings, budgets, pinned steps
    stagescope triggers test --rules FILE        which stored steps would have fired
    stagescope triggers test RULE                send the webhook of RULE a test message
    stagescope triggers set --rules FILE         needs the operate token
    stagescope triggers firings                  firings and the outcomes of their actions
    """
    if defaults:
        click.echo(session.default_triggers(), nl=False)
        click.get_current_context().exit()
    if rules is not None and action not in ("test", "set"):
        raise click.UsageError("--rules goes with `test` or `set`")
    if rule is not None:
        if action != "test" or rules is not None or run is not None or steps is not None:
            raise click.UsageError("RULE goes with `test` alone")
        tested = session.test_webhook(rule)
        if not tested["delivered"]:
            set_exit_code(1)
        return tested
    document = None if rules is None else text_file(rules)
    if action == "set":
        if document is None:
            raise click.UsageError("`set` needs --rules FILE")
        return _set_rules(session, document)
    if action == "test":
        return session.test_triggers(run, document, steps=steps)
    if action == "firings":
        return session.firings(run, only=only, limit=limit)
    return session.triggers(run)
