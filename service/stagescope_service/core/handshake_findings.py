"""Findings about a run's `settings`: names that look misspelt, and values that cannot be read.

Settings may hold anything of the user's own: only a name close to a known one, or a known name with
an invalid value, makes a finding. They are checked once, in a process's HELLO, not with payloads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from stagescope_service.core.catalogue_rows import (
    text,
)
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.findings import by_message, finding, of_attempt, of_process
from stagescope_service.core.handshakes import MAX_WORLD_SIZE
from stagescope_service.core.instructions import (
    Instruction,
)
from stagescope_service.rules.budget import Budget
from stagescope_service.statistics.settings import StatisticsSettings
from stagescope_wire.errors import InvalidInput
from stagescope_wire.keep import misspelt_selectors, validate_keep
from stagescope_wire.names import closest_by_words, misspelt_streams
from stagescope_wire.nonfinite import Json, JsonObject

KNOWN: Final[Mapping[str, str]] = {
    "expect": "'bitwise': the first token that differs is a finding",
    "capture": "'auto': rules may request captures within capture_budget",
    "capture_budget": "{'captures': n, 'bytes': n, 'share': part of the step time}",
    "producers": "{stream or tensor: who computes it}",
    "keep": "see stagescope_wire.keep.KEEP_FIELDS",
    "rollout_is": "'token' or 'sequence'",
    "rollout_is_threshold": "U, or 'L_U'",
    "rollout_is_batch_normalize": "a bool",
    "tokenizer": "path of a tokenizer.json, or of a directory that holds one",
}
"""Name of a setting -> what it may be."""
_BUDGET: Final = ("captures", "bytes", "share")
_NO_CAPTURE: Final = (None, False, "none")


def of_settings(attempt: Attempt, process: Process) -> list[Instruction]:
    """Return findings of settings that look misspelt or have values that cannot be read.

    One finding for each problem and attempt: all ranks report the same settings.
    """
    handshake = process.handshake
    if handshake is None or not handshake.settings:
        return []
    return [
        by_message(
            finding(
                kind,
                message,
                **of_attempt(attempt, handshake.wall),
                advice="change it where init is given settings, keep or producers",
            )
        )
        for kind, message in _problems(handshake.settings)
    ]


def _problems(settings: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield (kind of finding, message)."""
    wanted = [name for name in KNOWN if name not in settings]
    for name in settings:
        if name not in KNOWN and (meant := _meant(name, wanted, KNOWN)) is not None:
            text = f"settings has {name!r:.100}, which is no known setting: did you mean {meant}?"
            yield "misspelt_setting", text + _beside(meant, settings)
    expect, capture = settings.get("expect"), settings.get("capture")
    if expect not in (None, "bitwise"):
        yield _wrong("expect", expect)
    if capture not in ("auto", *_NO_CAPTURE):
        yield _wrong("capture", capture)
    yield from _budget(settings, is_auto=capture == "auto")
    yield from _producers(settings.get("producers"))
    yield from _kept(settings.get("keep"))
    try:
        StatisticsSettings.of_run(settings)
    except InvalidInput as error:
        yield "refused_setting", f"settings.{error}; the weights are published untruncated"


def _meant(name: str, *known: Collection[str]) -> str | None:
    """Return the known name that `name` is a plural or a likely misspelling of.

    `known`: collections of names; the first one is searched first.
    """
    singular = name.removesuffix("s")
    found = (singular if singular in each else closest_by_words(name, each) for each in known)
    return next((meant for meant in found if meant is not None), None)


def _beside(meant: str, given: Collection[object]) -> str:
    return f" {meant} stands beside it, and is read" if meant in given else ""


def _wrong(name: str, value: object) -> tuple[str, str]:
    return "refused_setting", f"settings.{name} is {value!r:.200}: expected {KNOWN[name]}"


def _budget(settings: JsonObject, *, is_auto: bool) -> Iterator[tuple[str, str]]:
    budget = settings.get("capture_budget")
    if isinstance(budget, Mapping):
        wanted = [name for name in _BUDGET if name not in budget]
        for name in budget:
            if name not in _BUDGET and (meant := _meant(str(name), wanted, _BUDGET)) is not None:
                text = f"settings.capture_budget has {name!r:.100}: did you mean {meant}?"
                yield "misspelt_setting", f"{text} Rules request no capture"
                return
    if is_auto and budget is None:
        yield (
            "refused_setting",
            "settings.capture is 'auto' and settings.capture_budget is missing: rules request no "
            "capture in this run, unless they name it with a budget; for example "
            "settings={'capture': 'auto', 'capture_budget': {'captures': 2}}",
        )
    elif is_auto:
        try:
            Budget.parse(budget, "settings.capture_budget")
        except InvalidInput as error:
            yield "refused_setting", f"{error}; rules request no capture"
    elif budget is not None and settings.get("capture") in _NO_CAPTURE:
        yield (
            "refused_setting",
            "settings.capture_budget is not read without settings.capture: 'auto'",
        )


def _producers(producers: Json) -> Iterator[tuple[str, str]]:
    if producers is None:
        return
    if not isinstance(producers, Mapping):
        yield _wrong("producers", producers)
        return
    for name, meant in misspelt_streams(producers):
        text = f"settings.producers names {name!r:.100}, which is no stream: did you mean {meant}?"
        yield "misspelt_setting", text + _beside(meant, producers)


def _kept(keep: Json) -> Iterator[tuple[str, str]]:
    if keep is None:
        return
    try:
        words = validate_keep(keep)["what"]
    except InvalidInput as error:
        yield "refused_setting", f"settings.keep is not taken: {error}"
        return
    for word, meant in misspelt_selectors(words):
        text = f"keep names {word!r:.100}, no section and no known tensor: did you mean {meant}?"
        yield "misspelt_setting", f"{text} A tensor of that name is kept where one is recorded"


def handshake_fields(attempt: Attempt, process: Process) -> list[Instruction]:
    """Return the findings about a process's handshake."""
    return [
        *_versions(attempt, process),
        *_world_size(attempt, process),
        *of_settings(attempt, process),
    ]


def _versions(attempt: Attempt, process: Process) -> list[Instruction]:
    """Return a finding of the unsupported packages of a process."""
    handshake = process.handshake
    reported: Json = None if handshake is None else handshake.fingerprint
    for name in ("versions", "unsupported"):
        reported = reported.get(name) if isinstance(reported, Mapping) else None
    lines = (
        [text(line, 500) or "" for line in reported] if isinstance(reported, list | tuple) else []
    )
    if handshake is None or not lines:
        return []
    return [
        finding(
            "unsupported_version",
            "; ".join(lines[:20]),
            **of_attempt(attempt, handshake.wall),
            role=process.role,
            advice="what it reports may be wrong or missing; training itself is not touched",
        )
    ]


def _world_size(attempt: Attempt, process: Process) -> list[Instruction]:
    """Return a finding of a process whose rank is beyond its own world_size, or which is none."""
    handshake = process.handshake
    size = None if handshake is None else handshake.world_size
    if handshake is None or size is None or process.rank < size <= MAX_WORLD_SIZE:
        return []
    return [
        finding(
            "refused_world_size",
            f"{process.role} rank {process.rank} says world_size {size}, which is not taken",
            **of_process(attempt, process, handshake.wall),
            severity="error",
            advice="ranks count from 0 to world_size - 1, both of the role; at most "
            f"{MAX_WORLD_SIZE} are known",
        )
    ]
