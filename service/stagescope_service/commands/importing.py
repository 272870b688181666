"""`stagescope import DIR`: a directory of dumps becomes a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import click

from stagescope import terminal
from stagescope.session import Session, attach
from stagescope_service.commands.imported_tables import (
    cut_off_tables,
    tables_without_calls,
    unread_tables,
    wait_for_tables,
)
from stagescope_service.commands.spooled import send_spool
from stagescope_wire import discovery, render, spool
from stagescope_wire.errors import Conflict, InvalidInput, NotFound
from stagescope_wire.names import display_name, run_name
from stagescope_wire.nonfinite import valid_text

if TYPE_CHECKING:
    from stagescope_service.dumps.importing import OperatorDump, ProcessEvents
    from stagescope_service.dumps.records import Dump, DumpProblem

KEEP: Final = {"what": ["all"], "parameters": ["*"], "gradients": ["*"]}
"""An imported run is kept completely."""
_SHOWN: Final = 20


class UnreadFile(TypedDict):
    """A file that could not be read."""

    path: str
    kind: str
    message: str


class Refusal(TypedDict):
    """An event or payload that the service refused; `seq` is None for a file."""

    seq: int | None
    reason: str


class ImportReport(TypedDict):
    """The result of an import, as `--json` prints it.

    Attributes:
        nothing_new: whether the run already held all data.
        processes, events, payloads: how many were sent and accepted.
        operators: ranks' dumps of msprobe's whose statistics became tables.
        problems: files that could not be read.
        refused: what the service refused.
        left_out: name -> why values in the files are no values of that name, such as zeros in place
            of a missing stream.
        missing: name -> number of rows without a value, if other rows have one.
        notes: other remarks about the files: facts that they lack and the import decided, and
            dumps without any call.
    """

    run: str
    attempt_key: str
    format: str
    nothing_new: bool
    processes: int
    events: int
    payloads: int
    operators: int
    problems: list[UnreadFile]
    refused: list[Refusal]
    left_out: dict[str, str]
    missing: dict[str, int]
    notes: list[str]


@click.command("import")
@click.argument("directory", type=click.Path(exists=True, path_type=Path))
@click.option("--run", type=terminal.RUN_NAME, help="Name of the run [default: the directory's].")
@click.option("--step", type=click.IntRange(min=0), help="Only this step.")
@click.option(
    "--format", "kind", help="Format of the files, if it is not recognised: nexrl, slime, ..."
)
@click.option(
    "--new-attempt",
    is_flag=True,
    help="Make it the next attempt of a run that exists already.",
)
@click.option("--follow", is_flag=True, help="Follow a spool as it grows, until interrupted.")
@click.option(
    "--delete", is_flag=True, help="Remove each file of a spool once the service has stored it."
)
@click.option("--url", help="The service, such as http://head:8700.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the operate token.")
@click.option(
    "--timeout",
    type=terminal.FiniteFloat(min=1),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Deadline of each call.",
)
@click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout.")
@click.pass_context
def import_directory(
    ctx: click.Context,
    directory: Path,
    run: str | None,
    step: int | None,
    kind: str | None,
    new_attempt: bool,
    follow: bool,
    delete: bool,
    url: str | None,
    token_file: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Register a directory of dumps as a run, so that every command works on it.

    Dumps of this project, NexRL (self-hosted, remote API, Weaver), slime, AReaL, NeMo-RL, prime-rl,
    verl and msprobe.
    This command reads the files and sends them to the service, which keeps what it needs. The same
    directory again, into the same run, counts once and prints "nothing new". A directory that grew
    becomes the run's next attempt. A run of another directory stays unchanged, unless --new-attempt
    is given: the newest attempt answers for the run. Exit status 1: the service refused data, or a
    file could not be read. All other data was imported.

    A spool holds the runs of processes whose STAGESCOPE_URL is file:///DIRECTORY. The command sends
    it as these processes would. You can repeat that: nothing counts twice. --follow sends while
    they train.
    """
    token = None if token_file is None else discovery.read_token(token_file)
    if directory.is_dir() and spool.folders(directory):
        if run is not None or step is not None or kind is not None or new_attempt:
            raise InvalidInput(
                f"{directory} is a spool, and its files name their runs",
                expected="no --run, --step, --format or --new-attempt with it",
            )
        with attach(url, token=token, timeout=timeout, link_text=terminal.command_of) as session:
            sent = send_spool(session, directory, follow=follow, delete=delete, show=not as_json)
        if as_json:
            terminal.show_json(sent)
        ctx.exit(1 if sent["refused"] or sent["unread"] else 0)
    if follow or delete:
        raise InvalidInput(
            f"{directory} is no spool, and --follow and --delete need one",
            expected="the directory of STAGESCOPE_URL=file:///DIRECTORY of a training",
            advice="import a directory that grew again: it becomes the run's next attempt",
        )
    try:
        from stagescope_service.dumps.discover import open_dump
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    name = run or directory.resolve().name
    dump = open_dump(directory.resolve(), step=step, kind=kind)
    with (
        attach(url, token=token, timeout=timeout, link_text=terminal.command_of) as session,
        terminal.progress("importing", hidden=as_json) as update,
    ):
        report = import_dump(session, dump, name, new_attempt=new_attempt, on_progress=update)
    if as_json:
        terminal.show_json(report)
    else:
        has_steps = not dump.entries or any(each.location.step is not None for each in dump.entries)
        _show(report, None if has_steps else directory)
    ctx.exit(1 if report["problems"] or report["refused"] else 0)


def import_dump(
    session: Session,
    dump: Dump,
    run: str,
    *,
    new_attempt: bool = False,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> ImportReport:
    """Send a dump as a run of the service and wait until its payloads are ingested.

    Args:
        session: with an operate token.
        dump: the directory's dump.
        run: name of the run, any text.
        new_attempt: whether a run of another directory gets another attempt.
        on_progress: called with the number of ingested payloads, and about how many there are.

    Raises:
        Conflict: the run exists, its newest attempt is from another directory, and `new_attempt` is
            False.
        StagescopeError: the service cannot be reached, or the token may not operate.
    """
    from stagescope_service.dumps.formats.listing import rank_dumps
    from stagescope_service.dumps.importing import (
        TrainedSamples,
        copy_operator_dumps,
        import_events,
        import_key,
        is_of_no_step,
    )

    found = rank_dumps(dump)
    if not dump.entries and not found:
        raise InvalidInput(
            f"{dump.name} holds nothing that can be imported",
            expected="a directory of dumps",
            advice="; ".join(each.message for each in dump.problems[:3]),
        )
    shown, run = display_name(run), run_name(run)
    key = import_key(dump, run)
    nothing_new = _is_complete(session, dump, run, key, new_attempt=new_attempt)
    report = _empty_report(dump, run, key, nothing_new=nothing_new)
    parts = len({each.location for each in dump.entries if not is_of_no_step(each)})
    senders: set[tuple[object, ...]] = set()
    announced: list[OperatorDump] = []
    from_texts: set[str] = set()
    samples = TrainedSamples()
    operators = copy_operator_dumps(found, run, key, _data_dir(session) if found else None)
    for batch in import_events(dump, run, key, keep=KEEP, operators=operators, display_name=shown):
        senders.add(batch.sender)
        samples.add(batch)
        for payload in batch.payloads.values():
            from_texts |= _add_conversions(report, payload["meta"])
        if _send(session, batch, report):
            announced += batch.operators
        on_progress(report["payloads"], parts)
    tables = wait_for_tables(session, run, key, announced)
    report["processes"] = len(senders)
    report["operators"] = sum(each["state"] == "digested" for each in tables.values())
    report["problems"] += map(_unread, cut_off_tables(announced, tables))
    report["refused"] += [Refusal(seq=None, reason=why) for why in unread_tables(announced, tables)]
    report["notes"] += [
        *tables_without_calls(tables),
        *(f"{name}: texts in the files, read as numbers" for name in sorted(from_texts)),
        *samples.notes(),
    ]
    return report


def _empty_report(dump: Dump, run: str, key: str, *, nothing_new: bool) -> ImportReport:
    """Return the report of an import that has sent nothing yet."""
    from stagescope_service.dumps.importing import NOTES, is_of_no_step

    notes = dump.about.get(NOTES)
    left_out = {
        f"{each.path.parent.name}/{each.path.name}": f"of step {each.location.step}, which is none"
        for each in dump.entries
        if is_of_no_step(each)
    }
    return ImportReport(
        run=run, attempt_key=key, format=dump.kind, nothing_new=nothing_new, processes=0, events=0,
        payloads=0, operators=0, problems=[*map(_unread, dump.problems)], refused=[],
        left_out=left_out, missing={}, notes=[*map(str, notes)] if isinstance(notes, list) else [],
    )  # fmt: skip


def _add_conversions(report: ImportReport, meta: Mapping[str, object]) -> set[str]:
    """Add what a payload's metadata say was left out or missing; return numbers read from texts."""
    from stagescope_service.dumps.formats.columns import FROM_TEXTS, MISSING
    from stagescope_service.dumps.records import mapping

    report["left_out"] |= {name: str(why) for name, why in mapping(meta, "left_out").items()}
    for name, count in mapping(meta, MISSING).items():
        if isinstance(count, int):
            report["missing"][name] = report["missing"].get(name, 0) + count
    read = meta.get(FROM_TEXTS)
    return set(map(str, read)) if isinstance(read, list) else set()


def _send(session: Session, batch: ProcessEvents, report: ImportReport) -> bool:
    """Send events and wait for their payloads; return whether the service accepted all events.

    It waits per stage, so that memory holds one stage.
    """
    problems = map(_unread, batch.problems)
    report["problems"] += [each for each in problems if each not in report["problems"]]
    answer = session.send(batch.sender, batch.events, batch.payloads)
    reasons = [*answer.refused.items(), *answer.refused_in_part.items()]
    report["refused"] += [Refusal(seq=seq, reason=reason) for seq, reason in reasons]
    accepted = batch.payloads.keys() - answer.refused.keys()
    left = set(accepted)
    while left:
        for seq, state in session.settled(batch.sender, sorted(left)).items():
            left.discard(seq)
            if state != "ingested":
                reason = f"the payload was {state}: see `stagescope lost`"
                report["refused"].append(Refusal(seq=seq, reason=reason))
    report["events"] += len(batch.events)
    report["payloads"] += len(accepted)
    return not answer.refused


def _is_complete(session: Session, dump: Dump, run: str, key: str, *, new_attempt: bool) -> bool:
    """Return whether a run already holds all of a dump; sending it again then changes nothing.

    Raises:
        Conflict: as `import_dump`.
    """
    from stagescope_service.dumps.importing import IMPORTED

    try:
        attempts = session.attempts(run)
    except NotFound:  # the run is new
        return False
    for row in attempts:
        if row["attempt_key"] == key:
            # An interrupted import never sent the end; lost payloads may arrive now.
            has_ended = row["state"] == "ended"
            return has_ended and not len(session.lost(run, row["attempt"], limit=1))
    newest = attempts[0]
    config = (newest["fingerprint"] or {}).get("config") or {}
    if not new_attempt and config.get(IMPORTED) != valid_text(dump.name):
        source = config.get(IMPORTED)
        made = "is a training that reported" if source is None else f"was imported from {source}"
        raise Conflict(
            f"run {run!r} exists: its attempt {newest['attempt']} {made}. {dump.name} would "
            "replace it as the newest attempt",
            expected="a name that no run has, in --run",
            advice=f"or give --new-attempt, to make this attempt {newest['attempt'] + 1} of {run}",
        )
    return False


def _data_dir(session: Session) -> Path | None:
    data_dir = Path(str(session.status().get("data_dir")))
    return data_dir if data_dir.is_dir() and os.access(data_dir, os.W_OK) else None


def _unread(problem: DumpProblem) -> UnreadFile:
    return {"path": str(problem.path), "kind": problem.kind, "message": problem.message}


def _show(report: ImportReport, stepless: Path | None) -> None:
    """Print a report; `stepless` is the directory where its files name no step."""
    wrong = [each["message"] for each in report["problems"]]
    wrong += [each["reason"] for each in report["refused"]]
    counts = [render.counted(report["payloads"], "payload")]
    if report["operators"]:
        counts.append(f"the operators of {render.counted(report['operators'], 'dump')}")
    processes = render.counted(report["processes"], "process", "processes")
    what = f"{' and '.join(counts)} of {processes}, from files of the format {report['format']}"
    click.echo(
        f"nothing new: already in run {report['run']}: {what}"
        if report["nothing_new"]
        else f"{report['run']}: {what}"
    )
    for text in wrong[:_SHOWN]:
        click.echo(f"  {terminal.style('not imported:', fg='red')} {render.printable(text)}")
    for name, why in [*report["left_out"].items()][:_SHOWN]:
        click.echo(f"  left out: {render.printable(f'{name}: {why}')}")
    if report["missing"]:
        named = [f"{name} of {render.counted(n, 'row')}" for name, n in report["missing"].items()]
        click.echo(f"  missing: {render.printable(', '.join(named[:_SHOWN]))}")
    for note in report["notes"][:_SHOWN]:
        click.echo(f"  note: {render.printable(note)}")
    listed = (wrong, report["left_out"], report["notes"])
    hidden = sum(max(0, len(each) - _SHOWN) for each in listed)
    if hidden:
        click.echo(f"  ... {hidden} more (--json lists all)")
    if stepless is not None and not report["operators"]:
        click.echo(
            "Its files name no step, so they have no metrics and rounds. You can compare them."
        )
        click.echo(f"try  stagescope compare {render.printable(str(stepless))} ANOTHER")
        return
    what = "operators captured" if report["operators"] else "steps"
    click.echo(f"try  stagescope {what} --run {report['run']}")
