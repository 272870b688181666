"""NexRL's trainers with stagescope attached, by `custom_trainer_module_path`: no launcher.

::

    # recipe/my_task/trainer.py
    from stagescope_workers.integrations.nexrl.door import SelfHostedGrpoTrainer as CustomTrainer

    # recipe/my_task/my_task.yaml
    trainer:
      custom_trainer_module_path: "trainer.py"  # beside the recipe

A process that gets such a class from another one (a Ray actor) imports this module, too, and is
attached by that. The ranks of the train service are not: they load no class of the configuration.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

from stagescope_workers.integrations.patches import Patches
from stagescope_workers.integrations.registry import install, integration

_TRAINERS: Final = {
    "SelfHostedGrpoTrainer": "nexrl.trainer.self_hosted_grpo_trainer",
    "SelfHostedOpdTrainer": "nexrl.trainer.self_hosted_opd_trainer",
    "RemoteApiGrpoTrainer": "nexrl.trainer.remote_api_grpo_trainer",
    "RemoteApiOpdTrainer": "nexrl.trainer.remote_api_opd_trainer",
    "RemoteApiCrossEntropyTrainer": "nexrl.trainer.remote_api_cross_entropy_trainer",
}


def attach() -> None:
    """Install NexRL's patches in this process, unless the launcher or an earlier call did."""
    found = integration("nexrl")
    finders = [finder for finder in sys.meta_path if isinstance(finder, Patches)]
    if found is not None and all(finder.package != found.package for finder in finders):
        install(found.package, found.module)


def __getattr__(name: str) -> object:
    """Return a trainer class of NexRL as one of this module, where other processes find it."""
    module = _TRAINERS.get(name)
    if module is None:
        raise AttributeError(f"{__name__} has none of the name {name!r}: {', '.join(_TRAINERS)}")
    attach()
    base = getattr(importlib.import_module(module), name)
    made = type(name, (base,), {"__module__": __name__, "__qualname__": name})
    globals()[name] = made
    return made
