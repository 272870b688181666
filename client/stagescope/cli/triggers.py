"""The rules in force: show, test, set; pinned steps."""

from __future__ import annotations

from pathlib import Path

import click

from stagescope.answers import Record
from stagescope.cli.questions import (
    LIMIT,
    question,
    text_file,
)
from stagescope.frames import Table
from stagescope.session import Session


@question(
    click.argument("action", type=click.Choice(["show", "test", "set", "firings"]), default="show"),
    click.option(
        "--rules",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="YAML file of rules, to test or to set.",
    ),
    click.option("--run", help="Only of this run (test: default the live one)."),
    click.option("--steps", type=click.IntRange(min=1), help="test: newest steps [default: 1000]."),
    click.option("--defaults", is_flag=True, help="Print the rules that ship, as YAML."),
    click.option("--only", metavar="RULE,...", help="firings: only of these rules."),
    LIMIT,
)
def triggers(
    session: Session,
    action: str,
    rules: Path | None,
    run: str | None,
    steps: int | None,
    defaults: bool,
    only: str | None,
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
    document = None if rules is None else text_file(rules)
    if action == "set":
        if document is None:
            raise click.UsageError("`set` needs --rules FILE")
        return session.set_triggers(document)
    if action == "test":
        return session.test_triggers(run, document, steps=steps)
    if action == "firings":
        return session.firings(run, only=only, limit=limit)
    return session.triggers(run)
