"""The command that serves a coding agent."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stagescope import terminal
from stagescope.cli.agents.tools import command_of
from stagescope.cli.common import main
from stagescope.session import Session
from stagescope_wire import discovery
from stagescope_wire.errors import InvalidInput, Unauthorized

if TYPE_CHECKING:
    from stagescope.cli.agents.serving import http


@main.command(name="mcp")
@click.option("--url", help="The service, such as http://head:8700.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File that holds the token.")
@click.option("--operate", is_flag=True, help="Also offer what changes something: captures, pins.")
@click.option(
    "--http", "port", type=click.IntRange(0, 65535), metavar="PORT",
    help="Serve HTTP on this port instead of stdio; agents send an access token.",
)  # fmt: skip
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="With --http: where to listen."
)
def mcp(
    url: str | None, token_file: Path | None, operate: bool, port: int | None, host: str
) -> None:
    """Serve the questions to a coding agent, by the Model Context Protocol.

    An agent starts this command and talks to it over stdin and stdout. It can only read, unless
    you give --operate.

    \b
    claude mcp add stagescope -- stagescope mcp --url http://HEAD:8700
    stagescope mcp --http 8710              http://HOST:8710/mcp, with the service's access tokens
    """
    try:
        from stagescope.cli.agents.serving import http, stdio
    except ImportError as error:
        raise terminal.needs_extra(error, "mcp") from error

    given = None if token_file is None else discovery.read_token(token_file)

    def open_session(location: discovery.ServiceLocation) -> Session:
        session = Session(location, link_text=command_of)
        try:
            session.check()
        except BaseException:
            session.close()
            raise
        return session

    if port is None:
        location = discovery.find(url, given)
        if not operate:
            location = dataclasses.replace(location, operate_token=None)
        with open_session(location) as session:
            stdio.serve(session, operate=operate)
        return
    # Whoever calls brings a token: those of this machine are not lent to others.
    bare = discovery.locate(url)
    sessions = http.Sessions(
        lambda token: open_session(dataclasses.replace(bare, read_token=token, operate_token=token))
    )
    if not discovery.is_loopback(f"http://{host}"):
        _check_tokens(sessions)
    click.echo(f"http://{host}:{port}{http.PATH} for {bare.url}; Ctrl-C ends it", err=True)
    http.serve(http.make_app(sessions, operate=operate, host=host), host, port)


def _check_tokens(sessions: http.Sessions) -> None:
    """Refuse to listen for other machines where the service asks nobody for a token."""
    with contextlib.suppress(Unauthorized), sessions.of(None):
        raise InvalidInput(
            "the service asks for no access token, so everybody could use it",
            expected="--host on loopback, or a service with access tokens",
        )
