"""miles, a fork of slime: the same stages, streams and samples, at its own import paths.

One flag attaches every rank, with `stagescope run` in front of the command or without it::

    --custom-megatron-init-path stagescope_workers.integrations.miles.init

Read in miles of 2026-08-21 (31f1ca961). It makes the trainer's pass before the update unless
`--use-rollout-logprobs` or `--skip-actor-forward-only` is set. It does not capture the update's
own pass, so a step without that pass is not measured. Its ranks do not learn the positions of their
samples in the rollout, so samples are named by data rank and row.
"""

from __future__ import annotations

from argparse import Namespace

from stagescope_workers.integrations import slime
from stagescope_workers.integrations.patches import Patch
from stagescope_workers.integrations.slime_modules import MILES


def patches() -> list[Patch]:
    """Return the patches of a rank."""
    return slime.patches(MILES)


def init(args: Namespace) -> None:
    """Attach this rank; miles calls it by `--custom-megatron-init-path`, once and early."""
    slime.init(args, MILES, __name__)
