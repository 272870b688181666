"""Evidence of a canary's findings: the engine instances and versions that show them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from stagescope_service.rules.evidence import Count, Evidence, not_found
from stagescope_service.rules.history import RunHistory
from stagescope_service.rules.symptoms.rows import detail_of, found_in, messages
from stagescope_service.store.tables import FindingRow
from stagescope_wire.render import counted


class _Version(NamedTuple):
    """A version of an engine instance."""

    attempt: int
    version: int


class _Jumps(NamedTuple):
    """The newest versions of an engine instance with a finding, without a break.

    Attributes:
        rows: their findings.
        versions: their versions.
        ended: whether enough versions agreed after them.
        after: the versions that agreed after them.
    """

    rows: list[FindingRow]
    versions: list[_Version]
    ended: bool
    after: list[_Version]


def of_canary(history: RunHistory, rows: Sequence[FindingRow]) -> Evidence:
    """Return the findings of a canary since the last version that agreed.

    They are those of the engine instances that still show them; if all ended, of all instances.
    """
    by_engine: dict[str, list[FindingRow]] = defaultdict(list)
    for row in rows:
        by_engine[detail_of(row, "engine") or ""].append(row)
    every = [_jumps(history, engine, own) for engine, own in by_engine.items()]
    lasting = [each for each in every if not each.ended]
    chosen = lasting or every
    shown = [row for each in chosen for row in each.rows]
    texts = messages(history, shown)  # sorts them
    evidence = dataclasses.replace(
        found_in(history, shown, texts), headline=_headline(history, shown, len(chosen))
    )
    first = min(each.versions[0] for each in chosen)
    last = max(each.versions[-1] for each in chosen)
    looks = {_version(history, row.attempt_id, row.version) for row in history.canaries}
    until = last if not lasting else max([*looks, last])
    versions = {each for of in chosen for each in of.versions}
    examined = {each for each in looks if first <= each <= until} | versions
    evidence = dataclasses.replace(evidence, count=Count(len(versions), len(examined), "version"))
    step = max((row["step"] for row in shown if row["step"] is not None), default=None)
    if not lasting and step is not None:
        after = min(each.after[0] for each in chosen)
        text = f"last seen in step {step}; the canary of version {after.version} agrees"
        return dataclasses.replace(evidence, last_step=step, against=(text,))
    if not lasting:
        return not_found(f"it ended: {evidence.headline}")
    if any(
        row.pairs and _version(history, row.attempt_id, row.version) > last
        for row in history.canaries
    ):  # it looked again, and could not compare what was wrong
        return evidence
    return dataclasses.replace(evidence, last_step=None, against=())


def _jumps(history: RunHistory, engine: str, rows: Sequence[FindingRow]) -> _Jumps:
    of = {row["finding_id"]: _version_of(history, row) for row in rows}
    replaced = _attempts_without(history, engine, max(of.values()))
    pairs = {pair["pair"] for row in rows for pair in detail_of(row, "pairs") or ()}
    breaks = max(int(detail_of(row, "ends_after") or 1) for row in rows)
    shown = {*of.values()}
    agreed = {
        version
        for row in history.canaries
        for version in [_version(history, row.attempt_id, row.version)]
        if row.source == engine or version.attempt in replaced
        if (row.pairs & pairs if pairs else row.pairs)
    } - shown
    begin, after = min(shown), list[_Version]()
    for each in sorted(shown | agreed):
        if each in agreed:
            after.append(each)
        else:
            begin = each if len(after) >= breaks else begin
            after = []
    return _Jumps(
        [row for row in rows if of[row["finding_id"]] >= begin],
        sorted(each for each in shown if each >= begin),
        len(after) >= breaks,
        after,
    )


def _attempts_without(history: RunHistory, engine: str, last: _Version) -> set[int]:
    """Return the attempts after a version whose canary knows other engine instances alone.

    A restart may give the same engine another name, such as a URL with another port.
    """
    names: dict[int, set[str]] = defaultdict(set)
    for row in history.canaries:
        names[history.number_of(row.attempt_id)].add(row.source)
    return {number for number, own in names.items() if number > last.attempt and engine not in own}


def _version_of(history: RunHistory, row: FindingRow) -> _Version:
    version = detail_of(row, "version")
    return _version(history, row["attempt_id"], version if isinstance(version, int) else 0)


def _version(history: RunHistory, attempt_id: int | None, version: int) -> _Version:
    return _Version(0 if attempt_id is None else history.number_of(attempt_id), version)


def _headline(history: RunHistory, rows: Sequence[FindingRow], engines: int) -> str:
    """Return the newest finding as a sentence, with the first version unless steps are known."""
    newest = max(rows, key=lambda row: _version_of(history, row))
    text = str(detail_of(newest, "headline") or "")
    if text and engines > 1:
        text += f" (and {counted(engines - 1, 'other engine')})"
    if text and any(row["step"] is None for row in rows):
        text += f", since version {min(_version_of(history, row) for row in rows).version}"
    return text
