"""The planted faults, by what they are of."""

from __future__ import annotations

from typing import Final

from tests.service.rules.benchmark.faults.engines import ASYNCHRONOUS, ENGINES
from tests.service.rules.benchmark.faults.reports import LATER, REPORTS
from tests.service.rules.benchmark.faults.streams import STREAMS
from tests.service.rules.benchmark.faults.trainings import TOGETHER, TRAININGS
from tests.service.rules.benchmark.faults.unnamed import UNNAMED
from tests.service.rules.benchmark.play import Fault

FAULTS: Final[tuple[Fault, ...]] = (
    *STREAMS, *ENGINES, *TRAININGS, *REPORTS, *TOGETHER, *ASYNCHRONOUS, *LATER, *UNNAMED,
)  # fmt: skip
HELD_OUT: Final = frozenset(fault.name for fault in FAULTS[2:140:3])
"""Every third of the first faults: rules and thresholds were chosen without it."""
