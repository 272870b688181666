"""Every function that the plugin replaces is there in the installed verl."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("verl")

pytestmark = pytest.mark.verl

OLDER = {
    f"verl.workers.{kind}_workers:{path}"
    for kind in ("fsdp", "megatron")
    for path in (
        "ActorRolloutRefWorker.compute_log_prob",
        "ActorRolloutRefWorker.compute_ref_log_prob",
        "ActorRolloutRefWorker.update_actor",
        "AsyncActorRolloutRefWorker.update_weights",
        "CriticWorker.compute_values",
        "CriticWorker.update_critic",
    )
}
"""Of verl 0.7 alone."""


def test_every_patch_is_applied() -> None:
    # In a process of its own: nothing of verl was imported there before the plugin.
    env = {name: value for name, value in os.environ.items() if name != "STAGESCOPE_VERL"}
    command = [sys.executable, "-m", "stagescope_workers.integrations.verl"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    patches = [line for line in lines if "  (" in line]
    absent = {line.split()[2] for line in patches if line.startswith("no module")}
    applied = [line.split()[1] for line in patches if line.startswith("applied ")]
    assert absent == OLDER, done.stdout
    assert len(applied) == len(patches) - len(OLDER), done.stdout
    assert max(Counter(applied).values()) == 1
    assert not any("not reported" in line for line in [*lines, *done.stderr.splitlines()])
