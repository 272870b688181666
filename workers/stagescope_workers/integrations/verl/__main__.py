"""`python -m stagescope_workers.integrations.verl`: what is patched in the verl that is here."""

from __future__ import annotations

import contextlib
import importlib

import click

from stagescope import versions
from stagescope_workers.integrations.verl.modes import VARIABLE, chosen


@click.command()
def main() -> None:
    """List what stagescope patches in the installed verl, and what it found there."""
    click.echo(f"verl {versions.installed('verl')}, {VARIABLE}={chosen().name}")
    for remark in versions.remarks(["verl"]):
        click.echo(remark)
    from stagescope_workers.integrations.verl import plugin

    for patch in plugin.INSTALLED or ():
        with contextlib.suppress(ImportError):
            importlib.import_module(patch.module)
        click.echo(f"{patch.state:10} {patch.module}:{patch.path}  ({patch.purpose})")


if __name__ == "__main__":
    main()
