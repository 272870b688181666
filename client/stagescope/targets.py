"""Names of runs, attempts and steps in comparisons: `run[@attempt][:step]`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from stagescope.wire.errors import InvalidInput
from stagescope.wire.schema import check_run_name

_TARGET: Final = re.compile(r"(?P<run>[^@:]+)(?:@(?P<attempt>\d{1,9}))?(?::(?P<step>\d{1,18}))?")


class Target(NamedTuple):
    """A run, an attempt of it (None: the newest) and a step (None: not specified)."""

    run: str
    attempt: int | None = None
    step: int | None = None

    def __str__(self) -> str:
        attempt = "" if self.attempt is None else f"@{self.attempt}"
        return f"{self.run}{attempt}{'' if self.step is None else f':{self.step}'}"


def read_target(text: object) -> Target:
    """Parse `qwen3-8b`, `qwen3-8b@2`, `qwen3-8b:5` or `qwen3-8b@2:5`.

    Raises:
        InvalidInput: another form, or an invalid name of a run.
    """
    match = _TARGET.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidInput(
            f"{text!r:.200} names no run", expected="RUN[@ATTEMPT][:STEP], such as qwen3-8b@2:5"
        )
    attempt, step = match["attempt"], match["step"]
    return Target(
        check_run_name(match["run"]),
        None if attempt is None else int(attempt),
        None if step is None else int(step),
    )
