"""`stagescope run -- COMMAND`: runs a training as it is, with stagescope attached to it.

The command replaces this process: its exit status, output and signals are its own. stagescope is
attached by environment variables alone, see `registry.environment`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import click

from stagescope_wire import discovery, proxies, spool
from stagescope_wire.errors import StagescopeError, Unauthorized
from stagescope_wire.names import run_name
from stagescope_workers.integrations.registry import environment

_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126
"""A shell's exit statuses for a command that it cannot run."""
_SEVERAL_NODES: Final = re.compile(r"--nnodes(=|$)(?!1$)")
_CONNECT_SECONDS: Final = 2.0


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--run", help="Name of the run; else STAGESCOPE_RUN, else the trainer's own name.")
@click.option("--attempt", help="Attempt key, the same on every node of one start.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(run: str | None, attempt: str | None, command: tuple[str, ...]) -> NoReturn:
    """Run a training's COMMAND with stagescope attached: `stagescope run -- python train.py`.

    Its exit status, its output and the signals that it gets are as without `stagescope run`. The
    trainers that are known report their stages, streams and numbers with no changed line
    (`python -m stagescope_workers.integrations` lists them); everything else just runs.
    """
    if run is not None:
        if not run.strip():
            raise click.BadParameter(
                "the name of the run is empty; is a variable of your shell unset?",
                param_hint="--run",
            )
        run_name(run)  # says here, before everything else, how it is stored
    click.echo(f"stagescope run: {service_line()}", err=True)
    key = attempt or attempt_key(command, os.environ)
    added = environment(os.environ, run=run, attempt_key=key)
    program = shutil.which(command[0])
    if program is None:
        click.echo(f"stagescope run: {command[0]}: command not found", err=True)
        raise SystemExit(_NOT_FOUND)
    try:
        os.execve(program, [*command], {**os.environ, **added})
    except OSError as error:
        click.echo(f"stagescope run: {command[0]}: {error.strerror}", err=True)
        raise SystemExit(_NOT_EXECUTABLE) from None


def service_line() -> str:
    """Return one line: which service the processes will find, or what to do about none."""
    if (directory := spool.directory_of(os.environ.get("STAGESCOPE_URL"))) is not None:
        return f"writes into the spool {directory}, for `stagescope import --follow`"
    try:
        location = discovery.find()
    except Unauthorized as error:
        return f"nothing is reported: {error}"
    except StagescopeError:
        return (
            "no service is known here, nothing is reported unless the training joins the Ray "
            "cluster of one: start one with `stagescope serve`, or set STAGESCOPE_URL"
        )
    service = f"{location.url} ({location.found})"
    try:
        service += proxies.way_to(location.url)
        address = proxies.first_address(location.url)
        socket.create_connection(address, timeout=_CONNECT_SECONDS).close()
    except (OSError, StagescopeError) as error:
        return f"the service at {service} does not answer: {error}"
    return f"reports to {service}"


def attempt_key(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return a key for this start, None where another launcher has a part in it on other nodes.

    A job of Slurm has one key on every node. Without a key the service finds out which processes
    belong together: see docs/ranks-and-attempts.md.
    """
    if environ.get("STAGESCOPE_ATTEMPT"):
        return environ["STAGESCOPE_ATTEMPT"]
    if environ.get("SLURM_JOB_ID"):
        return f"slurm-{environ['SLURM_JOB_ID']}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    nodes = [word for word in command if _SEVERAL_NODES.match(word)]
    if nodes or environ.get("PET_NNODES", "1") != "1" or environ.get("NODE_RANK"):
        return None
    # Started once on each node, as Kubernetes' training operators do.
    if environ.get("MASTER_ADDR") and environ.get("WORLD_SIZE", "1") != "1":
        return None
    return f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 1_000_000}"
