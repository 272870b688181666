"""A comparison for a reader, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from stagescope import render
from stagescope.engines import EngineInfo
from stagescope.frames import Table
from stagescope_workers.consistency.comparison import Comparison

_SHOWN_LEFT_OUT: Final = 3
_ORDER: Final = ("abs_diff", "q", "p", "sample", "position", "token_id", "token")
_WORDS: Final = {True: "ok", False: "NOT", None: "?"}


class Report:
    """What `stagescope consistency` prints."""

    def __init__(self, found: Comparison, recorded: str) -> None:
        self._found = found
        self._recorded = recorded

    @property
    def heading(self) -> str:
        """Which engine was held against which."""
        return f"{side(self._found.engine)} against {side(self._found.other)}"

    def _places(self) -> Iterator[str]:
        yield f"  engine  {self._found.engine.place}"
        yield f"  against {self._found.other.place}"

    def lines(self, *, width: int = 80) -> list[str]:
        """Return it as lines of at most `width` columns."""
        lines = []
        for text in self._lines():
            indent = " " * (len(text) - len(text.lstrip()))
            lines += render.wrapped(indent, text.strip(), width)
        return [*lines, *self._tables(width), *render.wrapped("", self._recorded, width)]

    def _lines(self) -> Iterator[str]:
        found = self._found
        drawn = found.sampling
        how = "greedily" if drawn.temperature == 0 else f"at temperature {drawn.temperature:g}"
        counts = f"{len(found.rows)} answers, {found.numbers['counts/tokens']:.0f} tokens"
        yield from self._places()
        if found.stored:
            yield f"{counts} of the stored {found.stored}"
        else:
            yield f"{counts}, sampled {how} by {found.engine.kind}"
        for warning in found.warnings:
            yield f"warning: {warning}"
        for check in found.checks:
            yield f"  {_WORDS[check.ok]:<3} {check.name:<10} {check.text}"
        for stream, told in found.streams.items():
            yield f"  {'q' if stream == 'rollout' else 'p'} is {_provenance(told)}"
        if found.left_out:
            reasons = list(found.left_out.items())[:_SHOWN_LEFT_OUT]
            told_of = "; ".join(f"{name}: {reason}" for name, reason in reasons)
            yield f"left out {len(found.left_out)} answers ({told_of})"
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
            [dataclasses.asdict(token) for token in self._found.worst], order=_ORDER
        )
        return [
            *Table(columns).lines(width=width),
            "worst tokens (q the engine's log-prob, p the other side's)",
            *worst.lines(width=width),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tokens themselves, as plain values."""
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
            "streams": {name: dict(said) for name, said in found.streams.items()},
            "metrics": dict(found.numbers),
            "worst": [dataclasses.asdict(token) for token in found.worst],
            "left_out": dict(found.left_out),
            "answers": None if agreement is None else dataclasses.asdict(agreement),
            "recorded": self._recorded,
        }


def side(info: EngineInfo) -> str:
    """Return an engine in a few words, without its place."""
    details = ", ".join(word for word in (info.dtype, info.quantisation) if word)
    version = f" {info.version}" if info.version else ""
    return f"{info.kind}{version}{f' ({details})' if details else ''}"


def _plain(info: EngineInfo) -> dict[str, Any]:
    return {**dataclasses.asdict(info), "settings": dict(info.settings)}


def _provenance(told: Any) -> str:
    kind = "after temperature and cuts" if told.get("processed") else "raw"
    words = [f"{told.get('engine')}'s, {kind}"]
    if told.get("processed"):
        words.append(f"temperature {told.get('temperature'):g}")
    if told.get("quantisation"):
        words.append(str(told["quantisation"]))
    return ", ".join(words)
