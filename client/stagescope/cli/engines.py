"""Commands for registered inference engines: list, add and remove them."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import click

from stagescope.answers import Record
from stagescope.cli.common import FILE, LIMIT, question
from stagescope.session import Session
from stagescope.table import Row, Table
from stagescope.terminal import RUN_NAME
from stagescope_wire.errors import EngineError


@question(
    click.argument("action", type=click.Choice(["list", "add", "remove"]), default="list"),
    click.argument("target", required=False, metavar="[URL|NAME]"),
    click.option(
        "--from-log",
        type=FILE,
        help="add: all servers in a launcher's log (AREAL_LLM_SERVER_ADDRS=...).",
    ),
    click.option("--name", help="add: its name [default: host and port]."),
    click.option("--run", type=RUN_NAME, help="add: the run that uses it."),
    click.option("--note", help="add: a note for its users."),
    click.option(
        "--key-file", type=click.Path(path_type=Path), help="File that holds the engine's key."
    ),
    click.option("--check", is_flag=True, help="list: check each engine's health now."),
    LIMIT,
)
def engines(
    session: Session, action: str, target: str | None, from_log: Path | None, name: str | None,
    run: str | None, note: str | None, key_file: Path | None, check: bool, limit: int,
) -> Table | Record:  # fmt: skip
    """The registered inference engines; `add` and `remove` need the operate token.

    \b
    stagescope engines --check                   the registered engines and their health
    stagescope engines add http://HOST:PORT      or HOST:PORT; its kind is detected
    stagescope engines add --from-log FILE       those in the log of AReaL's launcher
    stagescope engines add                       those of AREAL_LLM_SERVER_ADDRS
    stagescope engines remove NAME
    """
    if action == "list":
        if target is not None:
            raise click.UsageError(f"`list` takes no name: {target!r}")
        return session.engines(check=check, limit=limit)
    if action == "remove":
        if target is None:
            raise click.UsageError("`remove` needs a NAME")
        return session.remove_engine(target)
    urls = _urls(target, from_log)
    if name is not None and len(urls) > 1:
        raise click.UsageError(f"one --name for {len(urls)} engines: leave it out")
    fields: _Description = {"name": name, "run": run, "note": note}
    rows = [dict(_add(session, url, key_file, fields)) for url in urls]
    return Record(rows[0], title="registered engine") if len(rows) == 1 else _table(rows)


def _urls(target: str | None, from_log: Path | None) -> list[str]:
    from stagescope_wire.engines.registry import addresses_in_environment, addresses_in_log

    if target is not None and from_log is not None:
        raise click.UsageError("give a URL or --from-log, not both")
    if target is not None:
        return [target]
    return addresses_in_environment() if from_log is None else addresses_in_log(from_log)


class _Description(TypedDict):
    """The user's description of an engine."""

    name: str | None
    run: str | None
    note: str | None


def _add(session: Session, url: str, key_file: Path | None, fields: _Description) -> Record:
    from stagescope_wire.engines import connect
    from stagescope_wire.engines.registry import registration

    try:
        # This process connects, not the service, so that the key stays on this machine.
        engine = connect(url, key_file=key_file, timeout=10.0)
    except EngineError as error:
        added = session.add_engine(url, **fields)
        click.echo(f"registered all the same: {error}", err=True)
        return added
    engine.close()
    detected = {name: value for name, value in registration(engine.info).items() if name != "url"}
    return session.add_engine(url, **{**detected, **fields})


def _table(rows: list[Row]) -> Table:
    order = ("name", "kind", "url", "model", "run")
    return Table.from_rows(rows, order=order, title="registered engines")
