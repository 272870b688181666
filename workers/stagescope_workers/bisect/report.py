"""Formats a bisect as text, as JSON and as a picture, and records its arms as steps of a run."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from stagescope_wire import render
from stagescope_wire.atomic_file import atomic_file
from stagescope_wire.engines import EngineInfo, Sampling
from stagescope_wire.errors import InvalidInput
from stagescope_wire.names import BISECT
from stagescope_wire.schema import Target
from stagescope_workers.bisect.arms import ARMS, NAMES, Cost, Distance, Rung, Scores
from stagescope_workers.bisect.bisection import Bisection
from stagescope_workers.bisect.kept import Kept, Place
from stagescope_workers.bisect.verdict import Tried, Verdict
from stagescope_workers.consistency.comparison import EngineComparison, stream_provenance
from stagescope_workers.consistency.report import open_probe, record
from stagescope_workers.consistency.scored import Scored, check_shift, numbers

_BAR: Final = 16
_SHOWN: Final = 3


class CostReport:
    """What each arm costs."""

    def __init__(self, costs: Sequence[Cost], done: Mapping[str, Scores]) -> None:
        self._costs = costs
        self._done = done

    @property
    def heading(self) -> str:
        """The sum."""
        left = [each for each in self._costs if not each.left_out and each.arm not in self._done]
        seconds = sum(each.seconds or 0.0 for each in left)
        requests = sum(each.requests for each in left)
        return f"{len(left)} arms to score: about {seconds:.0f} s and {requests} requests"

    def lines(self, *, width: int = 80) -> list[str]:
        """Return a table of the arms, and why others are not run."""
        run = [each for each in self._costs if not each.left_out]
        columns = {
            "arm": tuple(each.arm for each in run),
            "tokens": tuple(each.tokens for each in run),
            "requests": tuple(each.requests for each in run),
            "about": tuple(
                "done" if each.arm in self._done else f"{each.seconds or 0.0:.1f} s" for each in run
            ),
        }
        lines = render.text_table(columns, units={}, width=width) if run else []
        for each in self._costs:
            if each.left_out:
                lines += render.wrapped("", f"left out {each.arm}: {each.left_out}", width)
        return lines

    def to_dict(self) -> dict[str, object]:
        """Return the costs as JSON."""
        return {"costs": [each._asdict() for each in self._costs], "done": [*self._done]}


class Report:
    """The answer of `stagescope bisect`."""

    def __init__(self, found: Bisection, recorded: str, state: Path) -> None:
        self._found = found
        self._recorded = recorded
        self._state = state

    @property
    def heading(self) -> str:
        """The cause in one sentence."""
        return self._found.verdict.text

    def lines(self, *, width: int = 80) -> list[str]:
        """Return the answer below its first line, of at most `width` columns."""
        lines = []
        for text in self._above():
            indent = " " * (len(text) - len(text.lstrip()))
            lines += render.wrapped(indent, text.strip(), width)
        lines += ["", *self._table(width), ""]
        for text in self._below():
            lines += render.wrapped("", text, width)
        return lines

    def _above(self) -> Iterator[str]:
        found = self._found
        yield found.verdict.meaning
        if found.verdict.advice:
            yield f"  -> {found.verdict.advice}"
        kept = found.kept
        of = "" if len(kept.rows) == kept.total else f" of {kept.total}"
        yield f"{kept.tokens} tokens of {len(kept.rows)}{of} trajectories of the {kept.heading}"
        if kept.place is not None:
            place = kept.place
            yield (
                f"Only tokens {_lower(place.text)} were scored: their mean |d| is "
                f"{_number(place.mean)}, that of the step's other tokens {_number(place.rest)}."
            )

    def _table(self, width: int) -> list[str]:
        done = [each for each in self._found.ladder.rungs if each.to_trainer is not None]
        to_trainer = [each.to_trainer for each in done if each.to_trainer is not None]
        top = max((each.mean for each in to_trainer if math.isfinite(each.mean)), default=0.0)
        columns = {
            "arm": tuple(each.arm for each in done),
            "|d|": tuple(_number(each.mean) for each in to_trainer),
            "to the trainer": tuple(_bar(each.mean, top) for each in to_trainer),
            "max": tuple(_number(each.max) for each in to_trainer),
            "before": tuple(_mean(each.to_before) for each in done),
            "floor": tuple(_number(each.scores.floor) for each in done),
            "tokens": tuple(each.tokens for each in to_trainer),
            "s": tuple(f"{each.scores.seconds:.1f}" for each in done),
        }
        return render.text_table(columns, units={}, width=width)

    def _below(self) -> Iterator[str]:
        found = self._found
        for each in found.ladder.rungs:
            if each.scores.status != "done":
                yield f"{each.scores.status} {each.arm}: {each.scores.reason}"
        for tried in sorted(found.tried, key=_order)[:_SHOWN]:
            if tried.now < tried.was:
                yield f"tried: {tried.text}: {_number(tried.was)} becomes {_number(tried.now)}"
        yield from found.notes
        yield self._recorded
        yield f"state in {self._state}"

    def to_dict(self) -> dict[str, object]:
        """Return the answer as JSON."""
        found = self._found
        return {
            **dataclasses.asdict(found.verdict),
            "named": found.verdict.is_named,
            "swap": None if found.ladder.gap is None else found.ladder.gap.arm,
            "mismatch": found.ladder.mismatch._asdict(),
            "floor": found.ladder.floor,
            "rounding": found.ladder.rounding,
            "step": found.kept.heading,
            "place": None if found.kept.place is None else found.kept.place._asdict(),
            "tokens": found.kept.tokens,
            "trajectories": len(found.kept.rows),
            "trajectories_of_step": found.kept.total,
            "arms": [_arm(each) for each in found.ladder.rungs],
            "tried": [each._asdict() for each in found.tried],
            "notes": list(found.notes),
            "recorded": self._recorded,
            "state": str(self._state),
        }


def _arm(rung: Rung) -> dict[str, object]:
    scores = rung.scores
    done = scores.status == "done"
    return {
        "number": NAMES.index(rung.arm),
        "arm": rung.arm,
        "swap": ARMS[rung.arm].swap,
        "status": scores.status,
        "reason": scores.reason,
        "to_trainer": None if rung.to_trainer is None else rung.to_trainer._asdict(),
        "before": rung.before or None,
        "to_before": None if rung.to_before is None else rung.to_before._asdict(),
        "floor": scores.floor if done else None,
        "floor_tokens": scores.floor_tokens,
        "seconds": scores.seconds,
    }


def _order(tried: Tried) -> float:
    return tried.now / tried.was if tried.was else math.inf


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}"


def _mean(found: Distance | None) -> str:
    return "" if found is None else _number(found.mean)


def _bar(value: float, top: float) -> str:
    if not top or not math.isfinite(value):
        return ""
    return "#" * math.ceil(_BAR * value / top) if value > 0 else ""


# --- the picture ----------------------------------------------------------------------------
PICTURES: Final = (".svg", ".html")
_WIDTH: Final = 760
_LEFT: Final = 330
_LINE: Final = 26


def save_picture(found: Bisection, path: Path) -> None:
    """Write the ladder as a picture: a bar per arm, |d| to the trainer.

    Raises:
        InvalidInput: another ending, or the directory does not exist.
        StoreError: the file cannot be written.
    """
    if path.suffix.lower() not in PICTURES:
        raise InvalidInput(f"{path} is not a picture", expected=f"a name with {PICTURES}")
    picture = svg(found)
    if path.suffix.lower() == ".html":
        title = html.escape(found.verdict.text)
        picture = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
            f"<body>{picture}</body></html>"
        )
    with atomic_file(path) as file:
        file.write(picture.encode())


def svg(found: Bisection) -> str:
    """Return the ladder as SVG."""
    done = [each for each in found.ladder.rungs if each.to_trainer is not None]
    pairs = [(each, each.to_trainer) for each in done if each.to_trainer is not None]
    top = max((to.mean for _, to in pairs if math.isfinite(to.mean)), default=0.0) or 1.0
    swap = None if found.ladder.gap is None else found.ladder.gap.arm
    texts = render.wrapped("", found.verdict.text, 100)
    head = 22 * len(texts) + 30
    parts = [
        f'<text x="10" y="{24 + 22 * index}" font-weight="bold">{html.escape(line)}</text>'
        for index, line in enumerate(texts)
    ]
    parts.append(f'<text x="{_LEFT}" y="{head}" fill="#666">mean |d| to the trainer, nats</text>')
    for index, (rung, to) in enumerate(pairs):
        y = head + 12 + _LINE * index
        length = (_WIDTH - _LEFT - 90) * to.mean / top if math.isfinite(to.mean) else 0.0
        colour = "#c0392b" if rung.arm == swap else "#4a78a8"
        swapped = html.escape(render.clip(ARMS[rung.arm].swap, 52))
        parts.append(
            f"<g><title>{html.escape(ARMS[rung.arm].swap)}</title>"
            f'<text x="{_LEFT - 8}" y="{y + 14}" text-anchor="end">{swapped}</text>'
            f'<rect x="{_LEFT}" y="{y + 2}" width="{max(length, 1):.1f}" height="16" '
            f'fill="{colour}"/>'
            f'<text x="{_LEFT + length + 6:.1f}" y="{y + 14}">{_number(to.mean)}</text></g>'
        )
    height = head + 24 + _LINE * len(pairs)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>'
    )


# --- steps ----------------------------------------------------------------------------------
def record_arm(
    kept: Kept, scores: Scores, engine: EngineInfo, *, run: str, key: str, url: str | None
) -> bool:
    """Record an arm as a step: its scores as the rollout's, the trainer's recorded as the old ones.

    Returns:
        Whether the service received it in time.

    Raises:
        Unreachable, StagescopeError: see `consistency.report.record`.
    """
    rows = [
        Scored(
            name=row.name,
            prompt=row.ids[: row.start],
            ids=row.ids[row.start :],
            q=values,
            p=row.p,
            mask=np.isfinite(values),
            group=row.group,
        )
        for row, values in zip(kept.rows, kept.split(scores.values), strict=True)
    ]
    arm = ARMS[scores.arm]
    old = EngineInfo("stored", kept.heading)
    sampling = kept.sampling if engine.processed else Sampling(temperature=1.0)
    side = dataclasses.replace(engine, place=f"{arm.name}: {arm.swap}")
    found = EngineComparison(
        engine=side,
        other=old,
        sampling=sampling,
        rows=tuple(rows),
        numbers=numbers(rows),
        worst=(),
        checks=(check_shift(rows),),
        left_out={},
        streams=stream_provenance(side, old, sampling, scaled=False),
        stored=kept.heading,
    )
    step = NAMES.index(scores.arm)
    return record(found, run=run, step=step, url=url, attempt_key=key)


def report_verdict(
    verdict: Verdict, target: Target, place: Place | None, *, run: str, key: str, url: str | None
) -> bool:
    """Report the answer on a step, as settings of the run of the arms; see `record_arm`."""
    about = target._asdict() | {
        "kind": verdict.kind, "text": verdict.text, "advice": verdict.advice,
        "ranks": [] if place is None else [*map(list, place.ranks)],
    }  # fmt: skip
    return open_probe(run, key, url, settings={BISECT: about}).close(_TIMEOUT)


_TIMEOUT: Final = 60.0
"""Seconds in which the service must acknowledge the answer."""
