"""`stagescope attach BUNDLE`: an archive, opened read-only with the client and the page."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import click

from stagescope import terminal
from stagescope.render import format_value


@click.command()
@click.argument(
    "bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="BUNDLE"
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Of the page [any free].")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: url and token.")
@click.option(
    "--until-eof", is_flag=True, hidden=True, help="End when stdin ends, as it does with a parent."
)
def attach(bundle: Path, port: int, as_json: bool, until_eof: bool) -> None:
    """Open an archive of `stagescope bundle`: the same page and client, read only, no service.

    It serves on loopback alone with a token of its own, until Ctrl-C; what it unpacked is removed.
    """
    try:
        from stagescope_service.api.app import make_app
        from stagescope_service.api.bundle.archive import unpack
        from stagescope_service.api.bundle.opened import open_unpacked
        from stagescope_service.api.server import ApiServer
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    with _until_interrupted(until_eof) as ended, tempfile.TemporaryDirectory("-stagescope") as name:
        root = Path(name)
        with terminal.progress("unpacking", hidden=as_json) as update:
            manifest = unpack(bundle, root, on_progress=update)
        opens = f"#/runs/{quote(manifest.run, safe='')}/steps/{manifest.step}"
        opens += f"?attempt={manifest.attempt}"
        opened = open_unpacked(root, f"the bundle {bundle.name}", opens)
        app = make_app(
            catalogue=opened.catalogue, commands=opened.commands, settings=opened.settings,
            tokens=opened.tokens,
        )  # fmt: skip
        server = ApiServer(app, port=port)
        server.start()
        try:
            if as_json:
                click.echo(json.dumps({"url": server.url, "token": opened.tokens.operate}))
            else:
                made = format_value(manifest.made_wall, "unix")
                click.echo(f"{bundle.name}: run {manifest.run}, attempt {manifest.attempt}, step "
                           f"{manifest.step}, made at {made}; read only")  # fmt: skip
                click.echo(f"url            {terminal.style(server.url, bold=True)}")
                # To read: the page then offers nothing to arm or to pin, which no bundle can.
                click.echo(f"token          {opened.tokens.read}")
                click.echo(f'notebook       stagescope.attach("{server.url}", '
                           f'token="{opened.tokens.operate}")')  # fmt: skip
                click.echo(f"its step       {server.url}/{opens}")
                click.echo("Ctrl-C ends it")
            sys.stdout.flush()
            ended.wait()
        finally:
            server.stop()
            opened.catalogue.close()


@contextlib.contextmanager
def _until_interrupted(until_eof: bool) -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set, and the end of stdin where it counts."""
    ended = threading.Event()

    def end(signal_number: int, frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}

    def read() -> None:
        sys.stdin.read()
        ended.set()

    if until_eof:
        threading.Thread(target=read, name="stdin", daemon=True).start()
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
