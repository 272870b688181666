"""Align two long sequences at a bounded cost.

The alignment is a longest common subsequence by Myers' greedy algorithm ("An O(ND) Difference
Algorithm and Its Variations", Algorithmica 1986), which is linear if two sequences differ little,
whatever repeats. The common beginning and end are removed first, then every element that the other
side lacks. If the rest would still cost too much, elements are paired by order of occurrence, and
the result is marked.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]
Pairs = list[tuple[int, int]]

MAX_STEPS: Final = 3_000_000
"""Most comparisons of one alignment: a few seconds."""
MAX_EDITS: Final = 1_000


class SequenceAlignment(NamedTuple):
    """Pairs of positions, ascending on both sides if `ordered`."""

    pairs: Pairs
    ordered: bool


def common_ends(a: Codes, b: Codes) -> tuple[int, int]:
    """Return the lengths of the common beginning and, after it, of the common end."""
    most = min(len(a), len(b))
    differing = np.flatnonzero(a[:most] != b[:most])
    first = int(differing[0]) if len(differing) else most
    left = most - first
    differing = np.flatnonzero(a[len(a) - left :][::-1] != b[len(b) - left :][::-1])
    return first, int(differing[0]) if len(differing) else left


def align(a: Codes, b: Codes, *, most_steps: int = MAX_STEPS) -> SequenceAlignment:
    """Pair equal elements of two sequences so that as many as possible stay in order."""
    first, last = common_ends(a, b)
    pairs = [(index, index) for index in range(first)]
    middle = _match_middle(
        np.arange(first, len(a) - last), np.arange(first, len(b) - last), a, b, most_steps
    )
    pairs += middle.pairs
    pairs += [(len(a) - index, len(b) - index) for index in range(last, 0, -1)]
    return SequenceAlignment(pairs, middle.ordered)


def _match_middle(
    at_a: Codes, at_b: Codes, a: Codes, b: Codes, most_steps: int
) -> SequenceAlignment:
    at_a, at_b = at_a[np.isin(a[at_a], b[at_b])], at_b[np.isin(b[at_b], a[at_a])]
    if not len(at_a) or not len(at_b):
        return SequenceAlignment([], True)
    found = _greedy(a[at_a].tolist(), b[at_b].tolist(), most_steps)
    ordered = found is not None
    if found is None:
        found = _by_occurrence(a[at_a].tolist(), b[at_b].tolist())
    return SequenceAlignment([(int(at_a[i]), int(at_b[j])) for i, j in found], ordered)


def _greedy(a: list[int], b: list[int], most_steps: int) -> Pairs | None:
    """Run Myers' algorithm; return None if it takes over `most_steps` or `MAX_EDITS`."""
    rows, columns = len(a), len(b)
    reach = {1: 0}
    trace: list[dict[int, int]] = []
    steps = 0
    for edits in range(min(rows + columns, MAX_EDITS) + 1):
        # Keep only the diagonals that this round reads.
        trace.append({k: reach[k] for k in range(-edits - 1, edits + 2, 2) if k in reach})
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            began = x
            while x < rows and x - k < columns and a[x] == b[x - k]:
                x += 1
            reach[k] = x
            steps += x - began + 1
            if x >= rows and x - k >= columns:
                return _walk_back(trace, rows, columns)
        if steps > most_steps:
            return None
    return None


def _walk_back(trace: list[dict[int, int]], x: int, y: int) -> Pairs:
    pairs: Pairs = []
    for edits in range(len(trace) - 1, -1, -1):
        reach, k = trace[edits], x - y
        down = k == -edits or (k != edits and reach[k - 1] < reach[k + 1])
        before_k = k + 1 if down else k - 1
        before_x = reach[before_k]
        before_y = before_x - before_k
        while x > max(before_x, 0) and y > max(before_y, 0):
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = before_x, before_y
    pairs.reverse()
    return pairs


def _by_occurrence(a: list[int], b: list[int]) -> Pairs:
    waiting: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(len(b) - 1, -1, -1):
        waiting[b[index]].append(index)
    return [(index, waiting[code].pop()) for index, code in enumerate(a) if waiting[code]]
