"""Differences between two attempts: their fingerprints and the locations of their ranks.

They come before any comparison of tensors: another package or option explains more than a number
can.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

AREAS: Final = (
    "git", "code", "config", "layout", "packages", "drivers", "python", "environment", "place",
)  # fmt: skip
"""Areas of a fingerprint; those that decide numbers come first."""

Weight = Literal["numbers", "place", "start", "unknown"]
"""Possible effect of a difference: on numbers, on the machine, or only on this start. If one side
lacks the value, the effect is unknown."""

_ORDER: Final[Mapping[Weight, int]] = {"numbers": 0, "place": 1, "start": 2, "unknown": 3}
_COMPLETE_AREAS: Final = ("config", "packages", "environment")
"""Areas that are recorded completely: a value missing in them does not exist on that side."""
_IMPORTED: Final = "imported"
"""Key in the configuration of a run that was imported from files."""

_PLACE: Final = ("node", "host", "device_index", "device_serial")
_LAYOUT: Final = (
    "world_size", "device_kind", "dp_rank", "dp_size", "tp_rank", "tp_size", "pp_rank", "pp_size",
    "vpp_rank", "vpp_size", "cp_rank", "cp_size", "sp_rank", "sp_size", "ep_rank", "ep_size",
    "etp_rank", "etp_size", "engine", "engine_version", "framework", "framework_version",
)  # fmt: skip
# Ray and launchers set these at every start; a training computes no number from them.
_STARTUP_VARIABLES: Final = re.compile(
    r"RAY_(JOB|SESSION|RAYLET|NODE|WORKER|CLIENT|LAUNCHER|ADDRESS|GCS)|MASTER_(ADDR|PORT)|"
    r"TORCHELASTIC_|SLURM_(JOB|STEP|TASK|LAUNCH|SRUN)|XDG_|STAGESCOPE_(ATTEMPT|URL|HOME|RUN)"
)
_KEEP_SETTINGS: Final = re.compile(r"keep(\.|\Z)")
"""Settings for keeping data: they change no computed number."""
_RAY_WORKER: Final = "default_worker.py"


_Streams: TypeAlias = "Mapping[tuple[str, str], Mapping[str, Sequence[object]]]"


class FingerprintDifference(NamedTuple):
    """A value that differs between the two sides; None if a side lacks it."""

    area: str
    name: str
    a: object
    b: object
    weight: Weight


class AttemptFingerprint(NamedTuple):
    """One side: what its processes reported at their start.

    Attributes:
        fingerprint: fingerprint of the attempt, as one process gathered it; None without one.
        processes: role, rank, world_size and the layout columns of each process.
    """

    fingerprint: Mapping[str, object] | None
    processes: Sequence[Mapping[str, object]]


def fingerprint_differences(
    a: AttemptFingerprint, b: AttemptFingerprint
) -> list[FingerprintDifference]:
    """Return everything that differs; what decides numbers comes first."""
    changes = _fingerprint_changes(a.fingerprint or {}, b.fingerprint or {})
    return in_order([*changes, *_rank_changes(a.processes, b.processes)])


def in_order(differences: Sequence[FingerprintDifference]) -> list[FingerprintDifference]:
    """Return differences with those that decide numbers first."""
    return sorted(differences, key=lambda each: (_ORDER[each.weight], AREAS.index(each.area)))


def stream_differences(a: _Streams, b: _Streams) -> list[FingerprintDifference]:
    """Return different attributes of streams that both sides have, such as a temperature.

    Args:
        a, b: (stage, stream) -> attribute -> its distinct values.
    """
    found = []
    for stream in sorted(a.keys() & b.keys()):
        for name in sorted(a[stream].keys() | b[stream].keys()):
            one, other = (
                values[0] if values is not None and len(values) == 1 else values
                for values in (a[stream].get(name), b[stream].get(name))
            )
            if one != other:
                weight: Weight = "unknown" if one is None or other is None else "numbers"
                label = ".".join((*stream, name))
                found.append(FingerprintDifference("config", label, one, other, weight))
    return found


def not_compared(a: AttemptFingerprint, b: AttemptFingerprint) -> list[str]:
    """Return sentences on values that neither side knows, so that no difference can show.

    A value that only one side knows is a difference of weight `unknown`.
    """
    one, other = a.fingerprint or {}, b.fingerprint or {}
    said = {
        "git": "no side was started in a git repository: only loaded Python files are compared",
        "config": "no side reported settings",
        "packages": "no side reported package versions",
        "environment": "no side reported environment variables",
    }
    found = [text for area, text in said.items() if not (one.get(area) or other.get(area))]
    found += _code_not_compared(_code(one), _code(other))
    states = [each.get("git") for each in (one, other)]
    if all(isinstance(git, Mapping) and git.get("dirty") is True for git in states):
        found.append(
            "both sides have uncommitted changes: of those only loaded Python files are compared"
        )
    return found


def _code(fingerprint: Mapping[str, object]) -> dict[str, object]:
    """Return module -> hash of the code that a side loaded."""
    code = fingerprint.get("code")
    return {str(name): value for name, value in code.items()} if isinstance(code, Mapping) else {}


def _code_not_compared(a: Mapping[str, object], b: Mapping[str, object]) -> list[str]:
    """Return sentences on the code that was not compared."""
    if not (a and b):
        lacking = [name for name, code in (("a", a), ("b", b)) if not code]
        sides = "no side has" if len(lacking) > 1 else f"side {lacking[0]} does not have"
        return [f"{sides} hashes of its script and modules: their edits are not seen"]
    found = []
    for side, modules in (("a", a.keys() - b.keys()), ("b", b.keys() - a.keys())):
        if modules:
            more = len(modules) - _NAMED_MODULES
            names = ", ".join(sorted(modules)[:_NAMED_MODULES])
            names += f" and {more} more" if more > 0 else ""
            found.append(f"only side {side} had loaded {names} when it started")
    if max(len(a), len(b)) >= MOST_MODULES:
        found.append(f"of the loaded modules the first {MOST_MODULES} by name are compared")
    return found


_NAMED_MODULES: Final = 5
MOST_MODULES: Final = 400
"""As many modules as a process reports."""


def _fingerprint_changes(
    a: Mapping[str, object], b: Mapping[str, object]
) -> Iterator[FingerprintDifference]:
    of_a, of_b = _code(a), _code(b)
    for name in sorted(of_a.keys() & of_b.keys()):
        if of_a[name] != of_b[name]:
            yield FingerprintDifference("code", name, of_a[name], of_b[name], "numbers")
    for area in ("git", "config", "packages", "drivers", "environment"):
        one, other = a.get(area), b.get(area)
        # Only this configuration of an imported run is known.
        is_complete = area in _COMPLETE_AREAS and not any(
            not isinstance(each, Mapping) or _IMPORTED in each for each in (one, other)
        )
        for name, value_a, value_b in _changes(one, other):
            is_start = (area == "environment" and _STARTUP_VARIABLES.match(name)) or (
                area == "config" and _KEEP_SETTINGS.match(name)
            )
            weight: Weight = "start" if is_start else "numbers"
            lacking = [side for side, value in ((one, value_a), (other, value_b)) if value is None]
            if lacking and not (is_complete and _is_absent(lacking[0], name)):
                weight = "unknown"
            yield FingerprintDifference(area, name, value_a, value_b, weight)
    for name, value_a, value_b in _changes(_interpreter(a), _interpreter(b)):
        varies = name == "argv" and _differ_at_every_start(value_a, value_b)
        weight = "start" if varies else "numbers"
        weight = "unknown" if None in (value_a, value_b) else weight
        yield FingerprintDifference("python", name, value_a, value_b, weight)


def _differ_at_every_start(a: object, b: object) -> bool:
    """Return whether two command lines differ in nothing but where they continue and write."""
    one, other = _options(a), _options(b)
    return all(_START_OPTION.search(name) for name, _ in set(one) ^ set(other))


_START_OPTION: Final = re.compile(
    r"(?:^|[-_.])(?:resume|restore|checkpoint|ckpt|address|port|pid|attempt"
    r"|(?:log|output|out)[-_]?(?:dir|file|path))(?:[-_.]|$)",
    re.IGNORECASE,
)
"""Options for where a start continues, connects and writes, by whole words of their names."""


def _options(arguments: object) -> list[tuple[str, str]]:
    """Return the (option, value) pairs of a command line, `name=value` included."""
    found: list[tuple[str, str]] = []
    option = ""
    for argument in map(str, arguments if isinstance(arguments, list) else [arguments]):
        name, is_pair, value = argument.partition("=")
        if argument.startswith("-") or is_pair:
            option = "" if is_pair else argument
            found.append((name, value))
        else:
            found.append((option, argument))
    return found


def _is_absent(tree: object, name: str) -> bool:
    """Return whether a tree lacks a dotted name; a name without a value is unknown, not absent."""
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return True
        tree = tree[part]
    return tree is not None


def _interpreter(fingerprint: Mapping[str, object]) -> dict[str, object]:
    found = {name: fingerprint.get(name) for name in ("python", "platform", "argv", "entrypoint")}
    argv = found["argv"]
    if isinstance(argv, list) and any(str(argument).endswith(_RAY_WORKER) for argument in argv):
        del found["argv"]  # Ray's own arguments: sockets and ids
    return {name: value for name, value in found.items() if value is not None}


def _rank_changes(
    a: Iterable[Mapping[str, object]], b: Iterable[Mapping[str, object]]
) -> Iterator[FingerprintDifference]:
    kinds: tuple[tuple[Sequence[str], str, Weight], ...] = (
        (_LAYOUT, "layout", "numbers"), (_PLACE, "place", "place"),
    )  # fmt: skip
    for columns, area, weight in kinds:
        one, other = (_columns_by_rank(rows, columns) for rows in (a, b))
        for name, value_a, value_b in _changes(one, other):
            is_on_both = name.rpartition(".")[0] in one.keys() & other.keys()
            is_unknown = is_on_both and None in (value_a, value_b)
            yield FingerprintDifference(
                area, name, value_a, value_b, "unknown" if is_unknown else weight
            )


def _columns_by_rank(
    processes: Iterable[Mapping[str, object]], names: Sequence[str]
) -> dict[str, object]:
    """Return `role/rank` -> its columns, from the newest process of the rank."""
    return {
        f"{row['role']}/{row['rank']}": {name: row.get(name) for name in names} for row in processes
    }


def _changes(a: object, b: object) -> Iterator[tuple[str, object, object]]:
    """Yield the dotted name and both values of everything that differs."""
    of_a, of_b = dict(leaves(a)), dict(leaves(b))
    for name in sorted({*of_a, *of_b}):
        if of_a.get(name) != of_b.get(name):
            yield name, of_a.get(name), of_b.get(name)


def leaves(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of every leaf of a nested mapping."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from leaves(each, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, value
