"""Formats a comparison as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final

from stagescope import render
from stagescope.engines import EngineInfo
from stagescope.table import Table
from stagescope_workers.consistency.comparison import EngineComparison

_MAX_SHOWN: Final = 3
_COLUMNS: Final = ("abs_diff", "q", "p", "sample", "position", "token_id", "token")
_MARKS: Final = {True: "ok", False: "NOT", None: "?"}


class Report:
    """The output of `stagescope consistency`."""

    def __init__(self, found: EngineComparison, recorded: str) -> None:
        self._found = found
        self._recorded = recorded

    @property
    def heading(self) -> str:
        """The two engines that were compared."""
        return f"{side(self._found.engine)} against {side(self._found.other)}"

    def _locations(self) -> Iterator[str]:
        yield f"  engine  {self._found.engine.place}"
        yield f"  against {self._found.other.place}"

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the report as lines of at most `width` columns."""
        lines = []
        for text in self._lines():
            indent = " " * (len(text) - len(text.lstrip()))
            lines += render.wrapped(indent, text.strip(), width)
        return [*lines, *self._tables(width), *render.wrapped("", self._recorded, width)]

    def _lines(self) -> Iterator[str]:
        found = self._found
        temperature = found.sampling.temperature
        how = "greedily" if temperature == 0 else f"at temperature {temperature:g}"
        counts = f"{len(found.rows)} answers, {found.numbers['counts/tokens']:.0f} tokens"
        yield from self._locations()
        if found.stored:
            yield f"{counts} of the stored {found.stored}"
        else:
            yield f"{counts}, sampled {how} by {found.engine.kind}"
        for warning in found.warnings:
            yield f"warning: {warning}"
        for check in found.checks:
            yield f"  {_MARKS[check.ok]:<3} {check.name:<10} {check.text}"
        for stream, provenance in found.streams.items():
            yield f"  {'q' if stream == 'rollout' else 'p'} is {_provenance(provenance)}"
        if found.left_out:
            shown = list(found.left_out.items())[:_MAX_SHOWN]
            reasons = "; ".join(f"{name}: {reason}" for name, reason in shown)
            yield f"left out {len(found.left_out)} answers ({reasons})"
        if (agreement := found.agreement) is not None:
            yield (
                f"answers: {agreement.same} of {agreement.answers} the same token by token; "
                f"{agreement.token_share:.1%} of the tokens before the first that differs"
            )
            if (accuracy := agreement.accuracy) is not None:
                yield (
                    f"accuracy over {agreement.marked}: {found.engine.kind} {accuracy[0]:.1%}, "
                    f"{found.other.kind} {accuracy[1]:.1%}"
                )

    def _tables(self, width: int) -> list[str]:
        if not self._found.rows:
            return []
        columns = {
            "name": tuple(self._found.numbers),
            "value": tuple(self._found.numbers.values()),
        }
        worst = Table.from_rows(
            [dataclasses.asdict(token) for token in self._found.worst], order=_COLUMNS
        )
        return [
            *Table(columns).lines(width=width),
            "worst tokens (q the engine's log-prob, p the other side's)",
            *worst.lines(width=width),
        ]

    def to_dict(self) -> dict[str, object]:
        """Return everything but the tokens themselves, as JSON."""
        found = self._found
        agreement = found.agreement
        return {
            "engine": _plain(found.engine),
            "against": _plain(found.other),
            "sampling": dataclasses.asdict(found.sampling),
            "stored": found.stored or None,
            "aligned": found.aligned,
            "checks": [dataclasses.asdict(check) for check in found.checks],
            "warnings": list(found.warnings),
            "streams": {name: dict(stream) for name, stream in found.streams.items()},
            "metrics": dict(found.numbers),
            "worst": [dataclasses.asdict(token) for token in found.worst],
            "left_out": dict(found.left_out),
            "answers": None if agreement is None else dataclasses.asdict(agreement),
            "recorded": self._recorded,
        }


def side(info: EngineInfo) -> str:
    """Describe an engine briefly, without its address."""
    details = ", ".join(detail for detail in (info.dtype, info.quantisation) if detail)
    version = f" {info.version}" if info.version else ""
    return f"{info.kind}{version}{f' ({details})' if details else ''}"


def _plain(info: EngineInfo) -> dict[str, object]:
    return {**dataclasses.asdict(info), "settings": dict(info.settings)}


def _provenance(stream: Mapping[str, object]) -> str:
    kind = "after temperature and cuts" if stream.get("processed") else "raw"
    parts = [f"{stream.get('engine')}'s, {kind}"]
    if stream.get("processed"):
        parts.append(f"temperature {stream.get('temperature'):g}")
    if stream.get("quantisation"):
        parts.append(str(stream["quantisation"]))
    return ", ".join(parts)
