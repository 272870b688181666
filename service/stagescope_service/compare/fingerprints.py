"""What changed between two attempts: their fingerprints and the places of their ranks.

Asked before any tensor is compared: another package or option explains more than a number can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

AREAS: Final = ("git", "config", "layout", "packages", "drivers", "python", "environment", "place")
"""In the order in which they are told: what decides numbers first."""

Weight = Literal["numbers", "place", "start", "unknown"]
"""What a difference may mean: other numbers, another machine, or only another start. What one side
does not know is no difference: whether it is the same is unknown."""

_ORDER: Final[Mapping[Weight, int]] = {"numbers": 0, "place": 1, "start": 2, "unknown": 3}
_LISTED: Final = ("config", "packages", "environment")
"""Areas that are listed whole: what is not in such a list of a side is not there."""
_IMPORTED: Final = "imported"
"""In the configuration of a run that was made of files."""

_PLACE: Final = ("node", "host", "device_index", "device_serial")
_LAYOUT: Final = (
    "world_size", "device_kind", "dp_rank", "dp_size", "tp_rank", "tp_size", "pp_rank", "pp_size",
    "vpp_rank", "vpp_size", "cp_rank", "cp_size", "sp_rank", "sp_size", "ep_rank", "ep_size",
    "etp_rank", "etp_size", "engine", "engine_version", "framework", "framework_version",
)  # fmt: skip
# Ray and launchers give these anew at every start; a training reads no number from them.
_OF_A_START: Final = re.compile(
    r"RAY_(JOB|SESSION|RAYLET|NODE|WORKER|CLIENT|LAUNCHER|ADDRESS|GCS)|MASTER_(ADDR|PORT)|"
    r"TORCHELASTIC_|SLURM_(JOB|STEP|TASK|LAUNCH|SRUN)|XDG_|STAGESCOPE_(ATTEMPT|URL|HOME|RUN)"
)
_OF_THE_SERVICE: Final = re.compile(r"keep(\.|\Z)")
"""Settings of what is looked at, which change nothing of what is computed."""
_RAY_WORKER: Final = "default_worker.py"


class Difference(NamedTuple):
    """One thing that is not the same on both sides; None where a side does not have it."""

    area: str
    name: str
    a: Any
    b: Any
    weight: Weight


class Attempt(NamedTuple):
    """One side: what its processes said at their start.

    Attributes:
        fingerprint: of the attempt, as a process gathered it; None where none did.
        processes: role, rank, world_size and the layout columns of each process.
    """

    fingerprint: Mapping[str, Any] | None
    processes: Sequence[Mapping[str, Any]]


def fingerprint_differences(a: Attempt, b: Attempt) -> list[Difference]:
    """Return everything that differs, what decides numbers first."""
    found = [*_told(a.fingerprint or {}, b.fingerprint or {}), *_ranks(a.processes, b.processes)]
    found.sort(key=lambda each: (_ORDER[each.weight], AREAS.index(each.area)))
    return found


def _told(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for area in ("git", "config", "packages", "drivers", "environment"):
        one, other = a.get(area), b.get(area)
        # Of a run that was made of files nothing else is known.
        is_listed = area in _LISTED and all(isinstance(each, Mapping) for each in (one, other))
        is_listed = is_listed and not any(_IMPORTED in each for each in (one, other) if each)
        for name, of_a, of_b in _apart(one, other):
            is_start = (area == "environment" and _OF_A_START.match(name)) or (
                area == "config" and _OF_THE_SERVICE.match(name)
            )
            weight: Weight = "start" if is_start else "numbers"
            lacking = [said for said, value in ((one, of_a), (other, of_b)) if value is None]
            if lacking and not (is_listed and _absent(lacking[0], name)):
                weight = "unknown"
            yield Difference(area, name, of_a, of_b, weight)
    for name, of_a, of_b in _apart(_interpreter(a), _interpreter(b)):
        weight = "start" if name == "argv" else "numbers"
        yield Difference("python", name, of_a, of_b, "unknown" if None in (of_a, of_b) else weight)


def _absent(listed: Any, name: str) -> bool:
    """Whether a dotted name is not in a tree; one that is there without a value is not known."""
    for word in name.split("."):
        if not isinstance(listed, Mapping) or word not in listed:
            return True
        listed = listed[word]
    return listed is not None


def _interpreter(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: fingerprint.get(name) for name in ("python", "platform", "argv", "entrypoint")}
    argv = found["argv"]
    if isinstance(argv, list) and any(str(word).endswith(_RAY_WORKER) for word in argv):
        del found["argv"]  # Ray's own words: sockets and ids, and nothing of the training
    return {name: value for name, value in found.items() if value is not None}


def _ranks(a: Iterable[Mapping[str, Any]], b: Iterable[Mapping[str, Any]]) -> Iterator[Difference]:
    both = {_rank(row) for row in a} & {_rank(row) for row in b}
    kinds: tuple[tuple[Sequence[str], str, Weight], ...] = (
        (_LAYOUT, "layout", "numbers"), (_PLACE, "place", "place"),
    )  # fmt: skip
    for columns, area, weight in kinds:
        for name, of_a, of_b in _apart(_columns(a, columns), _columns(b, columns)):
            is_known = None not in (of_a, of_b) or name.rpartition(".")[0] not in both
            yield Difference(area, name, of_a, of_b, weight if is_known else "unknown")


def _rank(row: Mapping[str, Any]) -> str:
    return f"{row['role']}/{row['rank']}"


def _columns(processes: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return `role/rank` -> what is known of it; the newest process of a rank answers."""
    found: dict[str, Any] = {}
    for row in processes:
        said = {name: row[name] for name in names if row.get(name) is not None}
        found[_rank(row)] = said
    return found


def _apart(a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted name and both values of everything that differs."""
    of_a, of_b = dict(_leaves("", a)), dict(_leaves("", b))
    for name in sorted({*of_a, *of_b}):
        if of_a.get(name) != of_b.get(name):
            yield name, of_a.get(name), of_b.get(name)


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), each)
    elif value is not None:
        yield prefix, value
