"""`python -m stagescope_workers.integrations [NAME]`: which trainers, and what is patched."""

from __future__ import annotations

import importlib
import importlib.util

import click

from stagescope_workers.integrations.patches import Patch
from stagescope_workers.integrations.registry import (
    INTEGRATIONS,
    Integration,
    install,
    integration,
)


@click.command()
@click.argument("name", required=False)
def main(name: str | None) -> None:
    """List the trainers that stagescope attaches to, or what it patches in the one NAMEd."""
    if name is None:
        for each in INTEGRATIONS:
            door = "by itself" if each.attaches_itself else "stagescope run"
            version, tried = _version(each), f"tried: {each.tried}" if each.tried else ""
            click.echo(f"{each.name:10} {version:16} {door:16} {tried}".rstrip())
        return
    found = integration(name)
    if found is None:
        names = ", ".join(each.name for each in INTEGRATIONS)
        raise click.BadParameter(f"{name!r} is none of {names}", param_hint="NAME")
    show(found)


def show(found: Integration) -> None:
    """Print each patch of a trainer, and its state in the version that is installed."""
    click.echo(f"{found.distribution} {_version(found)}")
    if (found.version() or _is_there(found)) and (remark := found.remark()):
        click.echo(remark)
    if found.attaches_itself:
        importlib.import_module(found.package)  # logs the missing hooks
        patches = importlib.import_module(found.module).INSTALLED or ()
    else:
        patches = install(found.package, found.module)
    for patch in patches:
        since = f", since {patch.since}" if patch.since else ""
        click.echo(f"{_state(patch):10} {patch.module}:{patch.path}  ({patch.purpose}{since})")


def _version(found: Integration) -> str:
    """Return the installed version, or how else the trainer is found: many run from a checkout."""
    return found.version() or ("a checkout" if _is_there(found) else "not installed")


def _is_there(found: Integration) -> bool:
    return importlib.util.find_spec(found.package) is not None


def _state(patch: Patch) -> str:
    try:
        importlib.import_module(patch.module)
    except Exception as error:  # a module of another version may raise anything
        # transformers raises one without a name where a module of its own cannot be imported.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None:
            return f"not imported: {error!r:.100},"
        return "no module" if f"{patch.module}.".startswith(f"{missing}.") else f"needs {missing}"
    return patch.state


if __name__ == "__main__":
    main()
