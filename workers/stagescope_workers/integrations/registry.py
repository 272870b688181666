"""The trainers that stagescope attaches to, and how it reaches all of their processes.

`stagescope run` hands the table to every process of the command as an environment variable.
`bootstrap/sitecustomize.py` reads it there and imports nothing until a trainer is imported. Then
it calls `install` of the trainer's module.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from stagescope_wire import versions
from stagescope_wire.versions import Tried
from stagescope_workers.integrations.patches import Patches

BOOTSTRAP: Final = Path(__file__).with_name("bootstrap")
"""The folder that `stagescope run` puts on PYTHONPATH."""
VARIABLE: Final = "STAGESCOPE_INTEGRATIONS"
"""The packages to watch for: `trl=stagescope_workers.integrations.trl,...`."""
_HERE: Final = "stagescope_workers.integrations"


@dataclasses.dataclass(frozen=True)
class Integration:
    """A trainer, or another package, that is patched where it is imported.

    Attributes:
        name: For `python -m stagescope_workers.integrations NAME`.
        package: Its top-level package, whose first import installs the patches.
        module: Ours; `patches()` of it returns the list of patches.
        distribution: Its name for `pip install`, to find its version.
        tried: The versions that were tried; docs/how-it-is-tested.md tells how. None: no trainer.
        attaches_itself: It loads its patches by an entry point, also without the launcher.
        states_version: Whether `__version__` of the package is the version of its distribution.
    """

    name: str
    package: str
    module: str
    distribution: str
    tried: Tried | None = None
    attaches_itself: bool = False
    states_version: bool = True

    def version(self, module: ModuleType | None = None) -> str | None:
        """Return the installed version, else that which the imported `module` states; or None."""
        found = versions.installed(self.distribution)
        if found is None and self.states_version:
            found = getattr(module, "__version__", None)
        return found if isinstance(found, str) else None

    def remark(self, module: ModuleType | None = None) -> str:
        """Return one line where this version was not tried; empty where it was."""
        return "" if self.tried is None else self.tried.remark(self.name, self.version(module))


INTEGRATIONS: Final = (
    Integration("verl", "verl", f"{_HERE}.verl.plugin", "verl", Tried("0.7", "0.10.0.dev0"),
                attaches_itself=True),
    Integration("trl", "trl", f"{_HERE}.trl", "trl", Tried("1.16", "1.16")),
    Integration("nexrl", "nexrl", f"{_HERE}.nexrl.plugin", "NexRL", Tried("1.4.0", "1.4.0"),
                states_version=False),  # 0.1.0, whatever it is
    Integration("areal", "areal", f"{_HERE}.areal", "areal", Tried("1.0.4", "1.0.4")),
    Integration("slime", "slime", f"{_HERE}.slime", "slime", Tried("0.3.1", "0.3.1")),
    Integration("miles", "miles", f"{_HERE}.miles", "miles", Tried("0.1.0", "0.1.0")),
    Integration("skyrl", "skyrl", f"{_HERE}.skyrl", "skyrl", Tried("0.3.0", "0.4.0")),
    Integration("openrlhf", "openrlhf", f"{_HERE}.openrlhf", "openrlhf",
                Tried("0.11.0", "0.11.2")),
    Integration("nemo-rl", "nemo_rl", f"{_HERE}.nemo_rl", "nemo-rl", Tried("0.6.0", "0.7.0")),
    Integration("ray", "ray", f"{_HERE}.ray_jobs", "ray"),
)  # fmt: skip


def watched() -> str:
    """Return the value of VARIABLE: the packages that `install` must be called for."""
    launched = (each for each in INTEGRATIONS if not each.attaches_itself)
    return ",".join(f"{each.package}={each.module}" for each in launched)


def integration(name: str) -> Integration | None:
    """Return the integration of that name; None if there is none."""
    return next((each for each in INTEGRATIONS if each.name == name), None)


def install(package: str, module: str) -> Patches:
    """Install the patches of an integration; log those that this version of `package` lacks."""
    found = next((each for each in INTEGRATIONS if each.package == package), None)
    installed = Patches(
        importlib.import_module(module).patches(),
        package,
        remark=None if found is None else found.remark,
    )
    installed.install()
    return installed


def environment(
    environ: Mapping[str, str], *, run: str | None = None, attempt_key: str | None = None
) -> dict[str, str]:
    """Return the variables that attach a process and its children, in addition to its own.

    Args:
        environ: The environment of the process.
        run, attempt_key: New values; where None, those of `environ` stay.
    """
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in paths if path != str(BOOTSTRAP)]
    changed = {"PYTHONPATH": os.pathsep.join([str(BOOTSTRAP), *others]), VARIABLE: watched()}
    if run is not None:
        changed["STAGESCOPE_RUN"] = run
    if attempt_key is not None:
        changed["STAGESCOPE_ATTEMPT"] = attempt_key
    return changed
