"""`python -m stagescope_workers.integrations.verl` lists the patches of the installed verl."""

from __future__ import annotations

import importlib

import click

from stagescope import versions
from stagescope_workers.integrations.patches import Patch
from stagescope_workers.integrations.verl.modes import VARIABLE, current_mode


@click.command()
def main() -> None:
    """List what stagescope patches in the installed verl, and the state of each patch."""
    click.echo(f"verl {versions.installed('verl')}, {VARIABLE}={current_mode().name}")
    for remark in versions.remarks(["verl"]):
        click.echo(remark)
    importlib.import_module("verl")  # logs the missing hooks
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
    except Exception as error:  # a module of another version may raise anything
        return f"not imported: {error!r:.100},"
    return patch.state


if __name__ == "__main__":
    main()
