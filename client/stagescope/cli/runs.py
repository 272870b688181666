"""The command for runs: list, rename, hide and delete them."""

from __future__ import annotations

import click

from stagescope.answers import Record
from stagescope.cli.common import LIMIT, question
from stagescope.session import Session
from stagescope.table import Table


@question(
    click.option("--delete", metavar="RUN", help="Delete this run with its files; asked twice."),
    click.option("--yes", is_flag=True, help="delete: do not ask (for scripts)."),
    click.option(
        "--rename", nargs=2, metavar="RUN NAME", help='Call it so in lists; "" is its own name.'
    ),
    click.option("--hide", metavar="RUN", help="Leave it out of lists."),
    click.option("--show", metavar="RUN", help="Show it again in lists."),
    click.option("--hidden", is_flag=True, help="List hidden runs, too."),
    LIMIT,
)
def runs(
    session: Session, delete: str | None, yes: bool, rename: tuple[str, str] | None,
    hide: str | None, show: str | None, hidden: bool, limit: int,
) -> Table | Record:  # fmt: skip
    """List the runs that have reported. Changes need the operate token.

    \b
    stagescope runs --delete RUN             delete it, after two questions
    stagescope runs --delete RUN --yes       delete it at once
    stagescope runs --rename RUN "No KL"     show another name; commands still use RUN
    stagescope runs --hide RUN               hide it from lists; `--show RUN` undoes it
    """
    chosen = [each for each in (delete, rename, hide, show) if each is not None]
    if len(chosen) > 1:
        raise click.UsageError("one of --delete, --rename, --hide and --show at a time")
    if yes and delete is None:
        raise click.UsageError("--yes goes with --delete")
    if delete is not None:
        return _delete(session, delete, yes=yes)
    if rename is not None:
        return session.rename_run(rename[0], rename[1] or None)
    if hide is not None:
        return session.hide_run(hide)
    if show is not None:
        return session.hide_run(show, hidden=False)
    return session.runs(hidden=hidden, limit=limit)


def _delete(session: Session, run: str, *, yes: bool) -> Record:
    if not yes:
        would = session.delete_run(run, dry_run=True)
        run = str(would["run"])  # it may have been called by its display name
        click.echo(would.heading, err=True)
        click.confirm("Delete all of it? Nothing brings it back", abort=True, err=True)
        typed = click.prompt("Type the name of the run to delete it", err=True)
        if typed != run:
            raise click.UsageError(f"{typed!r} is not {run!r}: nothing is deleted")
    return session.delete_run(run)
