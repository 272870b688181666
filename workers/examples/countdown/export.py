"""Converts a checkpoint's policy for an engine, to score stored rollouts again.

::

    python -m examples.countdown.export CHECKPOINT DIR8 --engine int8
    stagescope consistency --engine ctranslate2:DIR8 --batch RUN:5 --against stored

The rollouts of step 5 are of the checkpoint after step 4.
"""

from __future__ import annotations

from pathlib import Path

import click
from safetensors.numpy import load_file

from examples.countdown.engine import convert


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--engine", type=click.Choice(["int8", "float32"]), default="int8", show_default=True)
def export(checkpoint: Path, output: Path, engine: str) -> None:
    """Write the policy of CHECKPOINT (a `step_` folder) to OUTPUT in CTranslate2's format."""
    weights = load_file(checkpoint / "policy.safetensors")
    output.mkdir(parents=True, exist_ok=True)
    convert(weights, engine).save(str(output))


if __name__ == "__main__":
    export()
