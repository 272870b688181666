"""The collectives that cannot finish, as answers and findings show them."""

from __future__ import annotations

import dataclasses
from typing import Final, Literal, TypeAlias

from stagescope_wire.nonfinite import Json

Verdict: TypeAlias = Literal[
    "not entered", "different calls", "circle", "no record", "entered", "behind"
]

COLLECTIVE_KIND: Final = "collective_blocked"
"""The finding of a collective that cannot finish; its evidence holds the rows."""
OFF_KIND: Final = "collectives_not_recorded"
"""The finding of a hang whose ranks recorded no collective."""


@dataclasses.dataclass(frozen=True, slots=True)
class RanksAt:
    """Ranks whose training threads are on the same line."""

    ranks: list[int]
    """The ranks, from 0."""
    stage: str | None
    """The stage that they are in; null: none, or it is not known."""
    place: str | None
    """The innermost line of the training's own code, such as `save_checkpoint (trainer.py:212)`;
    null: it is not known."""
    layout: str
    """Parallel coordinates that all of them share, such as `dp 1`; empty: none, or they are not
    known."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallOfRanks:
    """Ranks that made the same call."""

    ranks: list[int]
    """The ranks, from 0."""
    operation: str
    """Such as `all_reduce`."""
    sizes: list[list[int]]
    """Shapes of its inputs: numbers of elements."""
    dtypes: list[str]
    """Of its inputs, then of its outputs, as torch names them."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockedCollective:
    """A collective, or a send or receive, that cannot finish."""

    role: str | None
    """Role of its ranks; null: it is not known, of files."""
    group: str
    """The process group: its description or number, and the parallel axis that it spans."""
    operation: str
    """Such as `all_gather`; `send 0->1` and `recv 1<-0` with ranks of the group."""
    sequence: int
    """Its number in the group, from 1, as the flight recorder counts."""
    verdict: Verdict
    """Why it cannot finish.

    `not entered`: ranks have not entered it. `different calls`: ranks called another collective
    under its number. `circle`: ranks wait for each other in several groups. `no record`: some ranks
    have no record. `entered`: all ranks entered it. `behind`: its missing ranks wait in another.
    """
    seconds: float | None
    """Seconds that its first rank has waited; null: it is not known, of files."""
    ranks: int
    """Number of ranks of the group."""
    waiting: list[RanksAt]
    """The ranks that wait in it."""
    missing: list[RanksAt]
    """The ranks that have not entered it."""
    unknown: list[int]
    """Ranks of the group of which there is no record."""
    calls: list[CallOfRanks]
    """The calls under its number: more than one where they differ."""
    message: str
    """All of it in words."""

    def to_json(self) -> dict[str, Json]:
        """Return it as built-in types."""
        return dataclasses.asdict(self)


def advice_of(row: BlockedCollective) -> str:
    """Return what to do about a collective that cannot finish."""
    match row.verdict:
        case "not entered":
            return (
                "every rank of the group must make the same calls in the same order. Look at the "
                "line of the missing ranks: a branch, an exception or a wait that only they have"
            )
        case "different calls":
            return (
                "every rank of the group must make the same calls in the same order, with the "
                "same sizes and dtypes. Look for a branch that depends on the rank or on its data"
            )
        case "circle":
            return "let every rank use the groups in the same order"
        case "no record":
            return "look at the processes of those ranks: `stagescope stacks` shows who answers"
        case _:
            return (
                "the calls agree. Look at the network, at the devices, and at what each rank "
                "enqueued before"
            )


OFF_MESSAGE: Final = "the ranks recorded no collective, so the hang has no name"
OFF_ADVICE: Final = (
    "for the next start, set TORCH_FR_BUFFER_SIZE=2000 (on Ascend TORCH_HCCL_TRACE_BUFFER_SIZE, "
    "for torch before 2.8 TORCH_NCCL_TRACE_BUFFER_SIZE) before init_process_group"
)
