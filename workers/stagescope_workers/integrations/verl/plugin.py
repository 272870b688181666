"""The module that verl imports; importing it attaches stagescope to verl.

verl loads it by the entry point `verl.plugins` (0.9 and later). Earlier ones need the variable
VERL_USE_EXTERNAL_MODULES=stagescope_workers.integrations.verl.plugin.
`python -m stagescope_workers.integrations.verl` lists what it patches.
"""

from __future__ import annotations

import logging
from typing import Final

from stagescope_workers.integrations import patches
from stagescope_workers.integrations.patches import Patches
from stagescope_workers.integrations.registry import integration
from stagescope_workers.integrations.verl import hooks
from stagescope_workers.integrations.verl.modes import current_mode

_log = logging.getLogger("stagescope.verl")


def _install() -> Patches | None:
    try:
        installed = Patches(hooks.patches(current_mode()))
        installed.install()
        found = integration("verl")
        patches.log_version(installed, "verl", None if found is None else found.remark)
    except Exception as error:  # verl must start in any case
        _log.warning("stagescope is not attached to verl: %r", error, exc_info=True)
        return None
    return installed


INSTALLED: Final = _install()
"""The patches of this process; None where their installation failed."""
