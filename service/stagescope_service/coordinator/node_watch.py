"""Nodes that the Ray cluster lost, and the processes lost with each, by attempt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from stagescope_service.core.catalogue_rows import row_id
from stagescope_service.core.entities import LOST, Attempt, Process
from stagescope_service.core.findings import NODE_LOST, finding, of_attempt
from stagescope_service.core.instructions import Instruction, Put
from stagescope_service.core.state import State
from stagescope_wire.links import Link

RECENT_SECONDS: Final = 120.0
"""A process that stopped reporting longer before the loss of its node had left on its own."""
_NAMED_RANKS: Final = 20


class NodeWatch:
    """Finds the nodes that were lost while processes on them reported; `check` is called often.

    Ray knows of a lost node after about 15 seconds, a lease lapses after 45: either may be first.

    Args:
        state: the coordinator's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._found: set[tuple[int, str]] = set()
        """Attempts and nodes that have a finding."""

    def check(self, lost: Mapping[str, str], wall: float) -> list[Instruction]:
        """Return the findings of lost nodes.

        Args:
            lost: node id -> why, as Ray has it; nodes that left as planned are not among them.
            wall: Unix time of the service.
        """
        if not lost:
            return []
        out: list[Instruction] = []
        for attempt in self._state.registry.attempts.values():
            for node, processes in _on(lost, attempt, wall).items():
                if (attempt.attempt_id, node) not in self._found:
                    self._found.add((attempt.attempt_id, node))
                    out.append(self._finding(attempt, node, lost[node], processes, wall))
        return out

    def _finding(
        self, attempt: Attempt, node: str, reason: str, processes: Sequence[Process], wall: float
    ) -> Put:
        ranks: dict[str, list[int]] = {}
        for process in processes:
            ranks.setdefault(process.role, []).append(process.rank)
        spans = [
            span
            for process in processes
            for span in (*process.open_spans.values(), *process.unfinished.values())
        ]
        # Those that an ingestor has looked for meanwhile are lost already.
        unread = sum(
            len(process.payloads) + [*process.settled.values()].count(LOST) for process in processes
        )
        step = max((process.max_step for process in processes if process.max_step is not None),
                   default=None)  # fmt: skip
        host = next((str(p.layout["host"]) for p in processes if p.layout.get("host")), None)
        put = finding(
            NODE_LOST,
            f"node {node}{'' if host is None else f' (host {host})'} was lost with "
            f"{_named(ranks)}, {_count(len(spans), 'open stage')} and "
            f"{_count(unread, 'unread payload')}: {reason}",
            **of_attempt(attempt, wall),
            severity="error",
            step=step,
            evidence={
                "node_id": node,
                "host": host,
                "ranks": {role: sorted(numbers) for role, numbers in ranks.items()},
                "open_stages": sorted({span.work.stage or "" for span in spans}),
                "unread_payloads": unread,
                "reason": reason,
            },
            advice="payloads announced there that never arrived are listed as lost. Kept files and "
            "recent tensors on the node's own disk cannot be read. Those in a shared data_dir can",
            see=(Link("losses", shows="what was lost"),),
        )
        finding_id = row_id(NODE_LOST, attempt.attempt_id, node)
        first = self._state.remember_finding(finding_id, wall)
        return Put("findings", {**put.row, "finding_id": finding_id, "first_wall": first})


def _on(lost: Collection[str], attempt: Attempt, wall: float) -> dict[str, list[Process]]:
    """Return lost node -> the processes that were on it until it was lost."""
    found: dict[str, list[Process]] = {}
    for process in attempt.processes.values():
        node, left = process.node_id, process.left_wall
        if node is None or node not in lost or process.finished or process.replaced:
            continue
        if left is None or wall - left < RECENT_SECONDS:
            found.setdefault(node, []).append(process)
    return found


def _named(ranks: Mapping[str, Sequence[int]]) -> str:
    texts = []
    for role, numbers in sorted(ranks.items()):
        named = ", ".join(map(str, sorted(numbers)[:_NAMED_RANKS]))
        more = f" and {len(numbers) - _NAMED_RANKS} more" if len(numbers) > _NAMED_RANKS else ""
        texts.append(f"{role} {'ranks' if len(numbers) > 1 else 'rank'} {named}{more}")
    return "; ".join(texts)


def _count(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"
