"""`stagescope token`: the tokens of people, teams and programs, in the home of the service.

It changes `tokens.json` of STAGESCOPE_HOME, on the machine where that is. No route of the service
hands out tokens: whoever may write the home is who may.
"""

from __future__ import annotations

from typing import Final

import click

from stagescope import terminal
from stagescope_service.commands.serving import settings_of

_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout.")
_COUNT: Final = click.IntRange(1, 1_000_000)


@click.group()
def token() -> None:
    """The access tokens of people, teams and programs; a running service follows within a second.

    They are in tokens.json of the home (STAGESCOPE_HOME), as hashes: a token is printed once. The
    home's two other tokens, read.token and operate.token, stay valid.
    """


@token.command("add")
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["read", "operate", "admin"]),
    required=True,
    help="read; operate: captures, triggers and pins, too, and reporting; admin: the audit, too.",
)
@click.option("--per-minute", type=_COUNT, help="Most requests a minute [default: any number].")
@click.option(
    "--reports-per-minute",
    type=_COUNT,
    help="Most reports a minute of trainings with it [default: any number].",
)
@click.option(
    "--proxy-user",
    metavar="PERSON",
    help="Name in the proxy's header (STAGESCOPE_TRUSTED_PROXY_HEADER); it needs no token.",
)
@_JSON
def add(
    name: str,
    role: str,
    per_minute: int | None,
    reports_per_minute: int | None,
    proxy_user: str | None,
    as_json: bool,
) -> None:
    """Add a token, and print it: it is stored nowhere."""
    home = settings_of({}).home
    from stagescope_service.http.access_token_file import ROLES, Token, add_token

    made = Token(
        name, next(each for each in ROLES if each == role), proxy_user=proxy_user,
        per_minute=per_minute, reports_per_minute=reports_per_minute,
    )  # fmt: skip
    _show(name, add_token(home, made), as_json)


@token.command("list")
@_JSON
def list_(as_json: bool) -> None:
    """List them, without the tokens."""
    home = settings_of({}).home
    from stagescope.table import Table
    from stagescope_service.http.access_token_file import describe, read_tokens

    rows = [describe(each) for each in read_tokens(home)]
    if as_json:
        terminal.show_json({"tokens": rows})
        return
    if not rows:
        click.echo("none but read.token and operate.token of the home")
        return
    terminal.show(Table.from_rows(rows), wide=True)


@token.command("rotate")
@click.argument("name")
@_JSON
def rotate(name: str, as_json: bool) -> None:
    """Replace a token by another with the same rights, and print that; logins with it end."""
    home = settings_of({}).home
    from stagescope_service.http.access_token_file import rotate_token

    _show(name, rotate_token(home, name), as_json)


@token.command("remove")
@click.argument("name")
@_JSON
def remove(name: str, as_json: bool) -> None:
    """Remove a token, and end logins with it."""
    home = settings_of({}).home
    from stagescope_service.http.access_token_file import remove_token

    remove_token(home, name)
    if as_json:
        terminal.show_json({"removed": name})
    else:
        click.echo(f"removed {name}")


def _show(name: str, text: str | None, as_json: bool) -> None:
    if as_json:
        terminal.show_json({"name": name, "token": text})
    elif text is None:
        click.echo(f"{name} logs in to the proxy, and needs no token", err=True)
    else:
        click.echo(text)
        click.echo("It is shown this once: put it into a file of mode 0600.", err=True)
