"""`stagescope import DIR`: a directory of dumps becomes a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stagescope import discovery, render, terminal
from stagescope.session import Session, attach
from stagescope.wire.errors import Conflict, InvalidInput, NotFound, NotReady
from stagescope.wire.schema import check_run_name

if TYPE_CHECKING:
    from stagescope_service.dumps.records import Dump

_CAPTURE: Final = "imported"
_TABLE_SECONDS: Final = 30.0
"""How long the table of one dump of operators may take."""
_PAUSE: Final = 0.1
KEEP: Final = {"what": ["all"], "parameters": ["*"], "gradients": ["*"]}
"""Of an imported run everything is kept: it was handed over to be looked at."""
_SHOWN: Final = 20


@click.command("import")
@click.argument("directory", type=click.Path(exists=True, path_type=Path))
@click.option("--run", help="Name of the run [default: the directory's].")
@click.option("--step", type=int, help="Only this step.")
@click.option(
    "--format", "kind", help="Of the files, where it is not recognised: nexrl, slime, ..."
)
@click.option(
    "--new-attempt",
    is_flag=True,
    help="Into a run that is there, of a training or of another directory, as its next attempt.",
)
@click.option("--url", help="The service, such as http://head:8700.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the operate token.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
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
    url: str | None,
    token_file: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Register a directory of dumps as a run, so that every question works on it.

    Dumps of this project, NexRL (self-hosted, remote API, Weaver), slime, AReaL, verl and msprobe.
    The files are read here and sent to the service, which keeps what it needs. The same directory
    again, into the same run, counts once and says "nothing new"; one that grew becomes the run's
    next attempt. A run that is not of this directory is left alone, unless --new-attempt is given:
    the newest attempt answers for the run. Exit status 1 where that refuses, or where a file could
    not be read: the others are there.
    """
    try:
        from stagescope_service.dumps.discover import open_dump
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    name = check_run_name(run or _name_of(directory))
    token = None if token_file is None else discovery.read_token(token_file)
    dump = open_dump(directory.resolve(), step=step, kind=kind)
    with attach(url, token=token, timeout=timeout) as session:
        report = import_dump(session, dump, name, directory, step=step, new_attempt=new_attempt)
    if as_json:
        terminal.show_json(report)
    else:
        _show(report)
    ctx.exit(1 if report["problems"] or report["refused"] else 0)


def import_dump(
    session: Session,
    dump: Dump,
    run: str,
    directory: Path,
    *,
    step: int | None = None,
    new_attempt: bool = False,
) -> dict[str, Any]:
    """Send a dump as a run of the service and wait until its payloads are taken in.

    Args:
        session: with a token that may operate.
        dump: of the directory.
        run: name of the run.
        directory: for messages.
        step: of dumps of operators only this one.
        new_attempt: whether a run that is not of this directory gets another attempt.

    Returns:
        run, attempt_key, format, processes, events, payloads, operators (ranks' dumps of msprobe's
        whose statistics became tables), `problems` (files that could not be read), `refused`
        (what the service did not take) and `nothing_new` (whether the run held all of it before).

    Raises:
        Conflict: the run is there, its newest attempt is not of this directory, and `new_attempt`
            is False.
        StagescopeError: the service cannot be reached, or the token may not operate.
    """
    from stagescope_service.dumps.formats.msprobe_directory import rank_dumps
    from stagescope_service.dumps.importing import calls, import_key, place_operators

    found = rank_dumps(dump, step=step)
    if not dump.entries and not found:
        raise InvalidInput(
            f"{directory} holds nothing that can be taken in",
            expected="a directory of dumps",
            advice="; ".join(each.message for each in dump.problems[:3]),
        )
    key = import_key(dump, run)
    report: dict[str, Any] = {"run": run, "attempt_key": key, "format": dump.kind}
    report["nothing_new"] = _is_there(session, dump, run, key, new_attempt=new_attempt)
    events = payloads = 0
    senders: set[Any] = set()
    problems = [_problem(each) for each in dump.problems]
    refused: list[dict[str, Any]] = []
    operators = place_operators(found, run, key, _data_dir(session) if found else None)
    for call in calls(dump, run, key, keep=KEEP, operators=operators):
        senders.add(call.sender)
        problems += [_problem(each) for each in call.problems]
        answer = session.send(call.sender, call.events, call.payloads)
        reasons = [*answer.refused.items(), *answer.refused_in_part.items()]
        refused += [{"seq": seq, "reason": reason} for seq, reason in reasons]
        taken = {seq for seq in call.payloads if seq not in answer.refused}
        refused += list(_waited(session, call.sender, taken))
        events += len(call.events)
        payloads += len(taken)
    steps = {place.step for _, place in found if place.step is not None}
    tables = list(_tables(session, run, steps, len(found)))
    refused += [
        {"seq": None, "reason": f"{each['dump_path']}: {each['reason']}"}
        for each in tables
        if each["state"] != "digested"
    ]
    counts = {"processes": len(senders), "events": events, "payloads": payloads}
    counts["operators"] = sum(each["state"] == "digested" for each in tables)
    return {**report, **counts, "problems": problems, "refused": refused}


def _is_there(session: Session, dump: Dump, run: str, key: str, *, new_attempt: bool) -> bool:
    """Return whether a run holds all of a dump: what is sent again then counts as sent before.

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
            # An import that broke off never said the end; what was lost may come now.
            is_whole = row["state"] == "ended"
            return is_whole and not len(session.losses(run, row["attempt"], limit=1))
    newest = attempts[0]
    config = (newest["fingerprint"] or {}).get("config") or {}
    if not new_attempt and config.get(IMPORTED) != dump.name:
        source = config.get(IMPORTED)
        made = "is of processes that reported" if source is None else f"was imported from {source}"
        raise Conflict(
            f"run {run!r} is there: its attempt {newest['attempt']} {made}, and {dump.name} would "
            "answer in its place",
            expected="a name that no run has, in --run",
            advice=f"or give --new-attempt, to make this attempt {newest['attempt'] + 1} of {run}",
        )
    return False


def _waited(session: Session, sender: Any, seqs: set[int]) -> Iterator[dict[str, Any]]:
    """Wait for the receipts of payloads, one stage at a time: so memory stays that of one."""
    left = set(seqs)
    while left:
        for seq, state in session.settled(sender, sorted(left)).items():
            left.discard(seq)
            if state != "ingested":
                yield {"seq": seq, "reason": f"the payload was {state}: see `stagescope losses`"}


def _data_dir(session: Session) -> Path | None:
    """Return the service's data directory where it lies on this machine, and may be written."""
    said = Path(str(session.status().get("data_dir")))
    return said if said.is_dir() and os.access(said, os.W_OK) else None


def _tables(session: Session, run: str, steps: set[int], count: int) -> Sequence[Mapping[str, Any]]:
    """Wait until the service has read `count` dumps of operators; return what became of each."""
    ends = time.monotonic() + _TABLE_SECONDS * max(count, 1)
    while True:
        rows = [row for step in sorted(steps) for row in _tables_of(session, run, step)]
        read = [row for row in rows if row["state"] != "announced"]
        if len(read) >= count or time.monotonic() > ends:
            return rows
        time.sleep(_PAUSE)


def _tables_of(session: Session, run: str, step: int) -> Sequence[Mapping[str, Any]]:
    try:
        found = session.step(step, run=run).operators(limit=1).about["tables"]
    except (NotFound, NotReady):  # none is read yet
        return []
    return [each for each in found if each["capture_id"] == _CAPTURE]


def _problem(problem: Any) -> dict[str, Any]:
    return {"path": str(problem.path), "kind": problem.kind, "message": problem.message}


def _name_of(directory: Path) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in directory.resolve().name)


def _show(report: dict[str, Any]) -> None:
    wrong = report["problems"] + report["refused"]
    held = [render.counted(report["payloads"], "payload")]
    if report["operators"]:
        held.append(f"the operators of {render.counted(report['operators'], 'dump')}")
    processes = render.counted(report["processes"], "process", "processes")
    what = f"{' and '.join(held)} of {processes}, from a directory in {report['format']}'s layout"
    is_known = report["nothing_new"]
    click.echo(
        f"nothing new: already in run {report['run']}: {what}"
        if is_known
        else f"{report['run']}: {what}"
    )
    for each in wrong[:_SHOWN]:
        text = each.get("message") or each["reason"]
        click.echo(f"  {terminal.style('not taken:', fg='red')} {render.printable(text)}")
    if len(wrong) > _SHOWN:
        click.echo(f"  ... {len(wrong) - _SHOWN} more (--json lists all)")
    what = "operators captured" if report["operators"] else "steps"
    click.echo(f"try  stagescope {what} --run {report['run']}")
