"""The service's own commands: `stagescope serve`, `stagescope stop` and `stagescope attach`.

They join the command line by the entry-point group `stagescope.commands`. Importing this module
loads neither ray nor pydantic, so that `stagescope --help` stays fast.
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict
from urllib.parse import quote

import click

from stagescope import terminal
from stagescope_wire import proxies, versions
from stagescope_wire.errors import InvalidInput
from stagescope_wire.names import closest_field
from stagescope_wire.nonfinite import Json
from stagescope_wire.render import format_value

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stagescope_service.serve import ServiceInfo
    from stagescope_service.settings import Settings

_PREFIX: Final = "STAGESCOPE_"
_OTHER_VARIABLES: Final = tuple(
    f"{_PREFIX}{name}"
    for name in (
        "ATTEMPT", "ENGINE_KEY", "ENGINE_KEY_FILE", "PROXY", "RUN", "TEST_BROWSER", "TOKEN",
        "TOKEN_FILE", "URL", "VERL", "VERL_FLOAT", "WATCHDOG", "WEIGHT_NAMES",
    )
)  # fmt: skip
"""Variables that are read elsewhere."""
_CLUSTER: Final = {
    "joined": "joined the Ray cluster at {}",
    "running": "joined the Ray cluster that runs here, at {}",
    "embedded": "started a Ray cluster of its own, at {}",
}

_ADDRESS: Final = click.option(
    "--address",
    metavar="HOST:PORT",
    help="Ray cluster to join (default: RAY_ADDRESS, else this home's service's cluster, else the "
    "one that `ray start` left here, else a new one); 'local': always a new one.",
)
_STOP_ADDRESS: Final = click.option(
    "--address",
    metavar="HOST:PORT",
    help="Ray cluster whose service to stop, for any home (default: this home's service's cluster, "
    "else RAY_ADDRESS, else the one that `ray start` left here).",
)
_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Strict JSON on stdout.")


class ServeOptions(TypedDict, total=False):
    """Settings that are given as options; None: not given."""

    host: str | None
    port: int | None
    data_dir: Path | None
    database_url: str | None
    database_schema: str | None
    ring_bytes: int | None


@click.command()
@_ADDRESS
@click.option("--host", help="Address that the API binds [default: 127.0.0.1].")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Port of the API, 0 = any free [default: 8700]."
)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the catalogue and the kept files [default: ~/.stagescope/data].",
)
@click.option("--database-url", help="Catalogue elsewhere, without a password in it.")
@click.option("--database-schema", help="PostgreSQL's schema of this service's catalogue.")
@click.option(
    "--ring-bytes", type=click.IntRange(min=0), help="Disk for the last steps' tensors, a node."
)
@_JSON
def serve(address: str | None, as_json: bool, **options: Unpack[ServeOptions]) -> None:
    """Start the service, or show where it runs already.

    It joins the Ray cluster at --address, else RAY_ADDRESS, else the one of this home's service,
    else the one that `ray start` left on this machine. If none exists, it starts one. It joins a
    cluster that a driver's ray.init made for itself only with --address. The service outlives
    this command and every training job. `stagescope stop` ends it. You can also give each setting
    as STAGESCOPE_<NAME>.
    """
    for remark in versions.remarks(versions.SERVICE):
        click.echo(f"note: {remark}", err=True)
    settings = settings_of(options)
    try:
        from stagescope_service.serve import start_service
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    info = start_service(settings, address=address)
    for note in _notes(info, settings, options):
        click.echo(f"note: {note}", err=True)
    if info.not_ready:
        click.echo(f"warning: the service runs but accepts no data yet: {info.not_ready}", err=True)
    if as_json:
        terminal.show_json(_as_json(info))
    else:
        _announce(info, settings)


def _notes(info: ServiceInfo, settings: Settings, options: ServeOptions) -> Iterator[str]:
    if info.dead_cluster:
        yield (
            f"the head of this home's Ray cluster at {info.dead_cluster} had died. stagescope "
            "ended the rest of that cluster. The service continues with the same data"
        )
    if info.passed_over:
        yield (
            f"another Ray cluster runs at {', '.join(info.passed_over)}. No `ray start` is known "
            "to have left it, so a service in it may end with its driver. stagescope did not join "
            "it. Use --address to join it"
        )
    unused = [
        f"--{name.replace('_', '-')}"
        for name, value in options.items()
        if value is not None and not (name == "port" and (not value or f":{value}" in info.url))
    ]
    if info.already_running and unused:
        yield (
            f"the running service keeps its settings and ignores {', '.join(unused)}. Run "
            "`stagescope stop` first"
        )
    if (mode := _others_mode(settings.data_path)) is not None:
        yield (
            f"others may read {settings.data_path} (mode {mode:o}). It holds tensors, texts and "
            f"dumps. Run `chmod 700 {settings.data_path}`"
        )


@click.command()
@_STOP_ADDRESS
@_JSON
def stop(address: str | None, as_json: bool) -> None:
    """Stop the service; what it has stored stays.

    If `serve` started a Ray cluster for it, that cluster ends too, with the trainings in it.

    The service of another home (STAGESCOPE_HOME) is stopped only by its --address.
    """
    settings = settings_of({})
    try:
        from stagescope_service.serve import stop_service
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    stopped = stop_service(settings, address=address)
    if as_json:
        terminal.show_json({"stopped": stopped})
    else:
        click.echo("stopped" if stopped else "no service was running")


def _others_mode(directory: Path) -> int | None:
    """Return a directory's mode if other users may read it, else None."""
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
    except OSError:  # it is on the head node
        return None
    return mode if mode & (stat.S_IRGRP | stat.S_IROTH) else None


def settings_of(options: ServeOptions) -> Settings:
    """Return the settings of the environment and of options; names misspelt variables."""
    try:
        from pydantic import ValidationError

        from stagescope_service.refusals import expected_of, name_of
        from stagescope_service.settings import Settings
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    for name, meant in _misspelt_variables(Settings.model_fields, os.environ):
        click.echo(f"note: {name} is not a setting, and ignored: did you mean {meant}?", err=True)
    given: dict[str, Json] = {n: v for n, v in options.items() if v is not None}  # pydantic checks
    try:
        return Settings(**given)
    except ValidationError as error:
        # Without the values: one may be a token.
        found = {name_of(item) or "together": expected_of(item) for item in error.errors()}
        raise InvalidInput(
            f"{'a setting is' if len(found) == 1 else 'settings are'} wrong: {', '.join(found)}",
            expected="; ".join(f"{name}: {text}" for name, text in found.items()),
            advice="options, and STAGESCOPE_<NAME> in the environment, are the settings",
        ) from None


def _misspelt_variables(
    fields: Iterable[str], environment: Iterable[str]
) -> Iterator[tuple[str, str]]:
    """Yield (variable, similar setting) of variables that are named like no setting."""
    known = [f"{_PREFIX}{field.upper()}" for field in fields]
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in (*known, *_OTHER_VARIABLES):
            meant = closest_field(name.lower(), map(str.lower, known))
            if meant is not None:
                yield name, meant.upper()


def _as_json(info: ServiceInfo) -> dict[str, object]:
    fields = dataclasses.asdict(info)
    del fields["passed_over"]
    return {name: str(v) if isinstance(v, Path) else v for name, v in fields.items()}


def _announce(info: ServiceInfo, settings: Settings) -> None:
    from stagescope_service.serve import is_same

    home = settings.home
    how = _CLUSTER[info.cluster].format(info.address)
    click.echo(f"stagescope is already running ({how})" if info.already_running else how)
    prefix = ""
    if not is_same(info.home, home):
        prefix = f"STAGESCOPE_HOME={info.home} "
        click.echo(f"home           {info.home}, not {home}: commands need {prefix}")
    elif info.already_running:
        click.echo(f"home           {info.home}")
    click.echo(f"url            {terminal.style(info.url, bold=True)}")
    # A token that is given by a variable has no file.
    read, read_value = str(info.token_file), f"$(cat {info.token_file})"
    operate, for_trainings = str(info.operate_token_file), f"_FILE={info.operate_token_file}"
    if settings.read_token is not None:
        read, read_value = "STAGESCOPE_READ_TOKEN", "$STAGESCOPE_READ_TOKEN"
    if settings.operate_token is not None:
        operate, for_trainings = "STAGESCOPE_OPERATE_TOKEN", "=$STAGESCOPE_OPERATE_TOKEN"
    click.echo(f"token          {read}  (to read)")
    click.echo(f"operate token  {operate}  (to request captures)")
    # Ray does not look for the token of a cluster that is given by address; joining it has set the
    # variable here, if there is a token.
    has_token = os.environ.get("RAY_AUTH_MODE") == "token"
    joining = f"{'RAY_AUTH_MODE=token ' if has_token else ''}RAY_ADDRESS={info.address}"
    click.echo(f"trainings      {joining} python train.py  (ray.init() joins)")
    if has_token:
        click.echo(f'               ray.init("{info.address}") needs RAY_AUTH_MODE=token, too')
    click.echo("               in a Ray cluster of their own, or without Ray: over HTTP, found by")
    click.echo(f"               {info.home / 'service.json'}, else set STAGESCOPE_URL={info.url}")
    click.echo(f"               and STAGESCOPE_TOKEN{for_trainings}")
    click.echo()
    click.echo(f"try            {prefix}stagescope status")
    direct = "--noproxy '*' " if proxies.unused_variable(info.url) else ""
    click.echo(f'               curl {direct}-H "Authorization: Bearer {read_value}" \\')
    click.echo(f"                    {info.url}/steps/measured/metrics")


@click.command()
@click.argument(
    "bundle", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="BUNDLE"
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Port of the page [any free]."
)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: url and token.")
@click.option(
    "--until-eof", is_flag=True, hidden=True, help="End when stdin ends, as it does with a parent."
)
def attach(bundle: Path, port: int, as_json: bool, until_eof: bool) -> None:
    """Open an archive of `stagescope bundle`: the same page and client, read only, no service.

    It serves only on loopback with its own access token, until Ctrl-C. It removes unpacked files.
    """
    try:
        from stagescope_service.http.app import make_app
        from stagescope_service.http.opened_bundle import open_unpacked
        from stagescope_service.http.server import ApiServer
        from stagescope_service.report.bundle.archive import unpack
    except ImportError as error:
        raise terminal.needs_extra(error, "service") from error
    with terminal.interruption() as ended, tempfile.TemporaryDirectory("-stagescope") as name:
        if until_eof:
            threading.Thread(target=_set_at_eof, args=[ended], name="stdin", daemon=True).start()
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
            app.state.deps.close()


def _set_at_eof(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()
