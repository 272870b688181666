"""`python -m stagescope_workers.integrations.verl` lists the patches of the installed verl."""

from __future__ import annotations

import click

from stagescope_workers.integrations import __main__ as listing
from stagescope_workers.integrations.registry import integration
from stagescope_workers.integrations.verl.modes import VARIABLE, current_mode


@click.command()
def main() -> None:
    """List what stagescope patches in the installed verl, and the state of each patch."""
    click.echo(f"{VARIABLE}={current_mode().name}")
    found = integration("verl")
    assert found is not None
    listing.show(found)


if __name__ == "__main__":
    main()
