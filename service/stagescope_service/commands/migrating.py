"""`stagescope migrate-catalogue FROM TO`: a catalogue moves into another database."""

from __future__ import annotations

import json
from pathlib import Path

import click

from stagescope import terminal


@click.command("migrate-catalogue")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout: rows by table.")
def migrate_catalogue(source: str, target: str, as_json: bool) -> None:
    """Copy a whole catalogue into another database, all or nothing.

    FROM and TO are data directories (their SQLite catalogue) or database URLs, such as
    postgresql+psycopg://USER@HOST/DATABASE, with ?options=-csearch_path%3DNAME for a schema. Stop
    the service first; FROM stays as it is, TO must be empty. Kept files stay where they are: start
    the service again with the same --data-dir and TO as --database-url.
    """
    try:
        from stagescope_service.store.connect import catalogue_url
        from stagescope_service.store.copying import copy_catalogue
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    urls = [
        given if "://" in given else catalogue_url(Path(given).expanduser())
        for given in (source, target)
    ]
    with terminal.progress("copying", hidden=as_json) as update:
        copied = copy_catalogue(*urls, on_rows=update)
    if as_json:
        click.echo(json.dumps({each.table: each.rows for each in copied}))
        return
    for each in copied:
        if each.rows:
            click.echo(f"{each.rows:>12}  {each.table}")
    click.echo(f"{sum(each.rows for each in copied):>12}  rows, all there")
