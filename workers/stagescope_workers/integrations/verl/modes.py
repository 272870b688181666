"""STAGESCOPE_VERL: how much of verl's training is reported."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any, Final

from stagescope_wire import proxies
from stagescope_workers.integrations import canary
from stagescope_workers.integrations.patches import after
from stagescope_workers.integrations.ray_jobs import passed

_log = logging.getLogger("stagescope.verl")

OFF: Final = "off"
METRICS: Final = "metrics"
STAGES: Final = "stages"
ALL: Final = "all"
_MODES: Final = (OFF, METRICS, STAGES, ALL)
VARIABLE: Final = "STAGESCOPE_VERL"
FLOAT32: Final = "STAGESCOPE_VERL_FLOAT32"
"""Set to 1: V1's own debug metrics and perplexities are computed in float32, not in bfloat16."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """How much is reported.

    Attributes:
        name: off, metrics, stages or all.
    """

    name: str

    @property
    def metrics(self) -> bool:
        """Whether batches are recorded, and the service's numbers are added to verl's log."""
        return self.name in (METRICS, ALL)

    @property
    def stages(self) -> bool:
        """Whether stages are reported, and captured."""
        return self.name in (STAGES, ALL)


def current_mode() -> Mode:
    """Return the mode of STAGESCOPE_VERL; `all` where it is unset or unknown."""
    name = os.environ.get(VARIABLE, ALL).strip().lower() or ALL
    if name not in _MODES:
        _log.warning("%s is %r: one of %s is expected; using %r", VARIABLE, name, _MODES, ALL)
        name = ALL
    return Mode(name)


def wants_float32() -> bool:
    """Return whether to upcast verl's own numbers; by default none of them is changed."""
    return os.environ.get(FLOAT32, "").strip().lower() in ("1", "true", "yes", "on")


PASSED_VARIABLES: Final = (
    VARIABLE, FLOAT32, canary.VARIABLE, "STAGESCOPE_RUN", "STAGESCOPE_ATTEMPT", "STAGESCOPE_URL",
    proxies.VARIABLE, "STAGESCOPE_HOME", "STAGESCOPE_TOKEN_FILE",
)  # fmt: skip
"""No token; see `ray_jobs`."""


@after("the variables of the job's processes")
def wrap_runtime_env(environment: Any, *args: object, **kwargs: object) -> None:
    """Wrap `get_ppo_ray_runtime_env`: it adds the plugin's variables to verl's."""
    variables = environment["env_vars"]
    variables |= {**passed(PASSED_VARIABLES), **variables}
