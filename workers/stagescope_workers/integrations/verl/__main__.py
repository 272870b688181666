"""`python -m stagescope_workers.integrations.verl`: what is patched in the verl that is here."""

from __future__ import annotations

import importlib

import click

from stagescope import versions
from stagescope_workers.integrations.verl.modes import VARIABLE, chosen
from stagescope_workers.integrations.verl.patches import Patch


@click.command()
def main() -> None:
    """List what stagescope patches in the installed verl, and what it found there."""
    click.echo(f"verl {versions.installed('verl')}, {VARIABLE}={chosen().name}")
    for remark in versions.remarks(["verl"]):
        click.echo(remark)
    importlib.import_module("verl")  # says what is left out
    from stagescope_workers.integrations.verl import plugin

    for patch in plugin.INSTALLED or ():
        state = _state(patch)
        click.echo(f"{state:10} {patch.module}:{patch.path}  ({patch.purpose})")


def _state(patch: Patch) -> str:
    try:
        importlib.import_module(patch.module)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        return "no module" if f"{patch.module}.".startswith(f"{missing}.") else f"needs {missing}"
    except Exception as error:  # whatever a module of another version stumbles over here
        return f"not imported: {error!r:.100},"
    return patch.state


if __name__ == "__main__":
    main()
