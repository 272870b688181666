"""Prompts over steps: those whose samples differ more than their steps do, again and again.

A prompt's ratio is the sum of |d| of its tokens over their sum at the mean |d| of their steps. So a
step with a larger mismatch does not make its prompts stand out.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import plotly.graph_objects as go

from stagescope_service import figure_style as style
from stagescope_service.statistics.sequence_row import ROW
from stagescope_service.statistics.step_summary import StepSummary
from stagescope_service.views.reading.completeness import ALL_ROWS
from stagescope_service.views.reading.dependencies import Dependencies, Window
from stagescope_service.views.reading.rows import Lineage
from stagescope_service.views.steps.numbers import doubted_steps
from stagescope_wire.errors import InvalidInput
from stagescope_wire.render import counted, ranges_text

MAX_STEPS: Final = 40
"""Most steps that are read, the newest of the range: each with its whole step summary."""
MAX_PROMPTS: Final = 20
MIN_TOKENS: Final = 32
"""Least tokens of a prompt: with fewer, its mean is chance."""
TWICE: Final = 2.0
_TOKENS, _ABS_SUM = ROW.index("tokens"), ROW.index("d_abs_sum")
_LABEL: Final = 24
"""Characters of a prompt's name on the axis."""


class _Occurrence(NamedTuple):
    """The samples of one prompt in one step."""

    step: int
    samples: int
    tokens: float
    abs_sum: float
    """Sum of |d|, nats."""
    expected: float
    """The same if each token had the step's mean |d|."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The samples of one prompt, over the steps that hold it."""

    prompt_hash: str
    steps: tuple[int, ...]
    samples: int
    tokens: int
    mean_abs: float
    """Mean |d|, nats."""
    ratio: float
    """Sum of |d|, divided by the sum that the tokens would have at the means of their steps."""
    above: int
    """Steps in which its mean |d| is at least twice the step's."""


@dataclasses.dataclass(frozen=True)
class OffendersInfo:
    """The data of the figure."""

    run: str
    attempt: int | None
    steps: tuple[int, ...]
    """The steps that were read, ascending."""
    prompts: int
    """Number of prompts in them."""
    rows: tuple[Prompt, ...]
    """Those that stand out in the most steps first, then the largest ratio."""
    note: str | None
    step: None = None


def info(deps: Dependencies, run: str | None, attempt: int | None, window: Window) -> OffendersInfo:
    """Read the samples of the newest `MAX_STEPS` current steps of a range, by their prompts."""
    target = deps.finder.attempt(run, attempt)
    steps: dict[int, int] = {}
    found: dict[str, list[_Occurrence]] = defaultdict(list)
    for step, attempt_id, prompts in _measured(deps, target.run, attempt, window):
        steps[step] = attempt_id
        for name, occurrence in prompts.items():
            found[name].append(occurrence)
    note = None
    if not steps:
        note = "no step in this range has both streams"
    elif not found:
        note = "which prompt a sample belongs to is not recorded (prompt_hashes)"
    rows = [_prompt(name, each) for name, each in found.items()]
    rows = [row for row in rows if row.tokens >= MIN_TOKENS]
    rows.sort(key=lambda row: (-row.above, -row.ratio, row.prompt_hash))
    if found and not rows:
        note = f"no prompt has {MIN_TOKENS} tokens that count"
    if rows:
        note = "; ".join(doubted_steps(deps, steps)) or None
    return OffendersInfo(
        target.run, attempt, tuple(sorted(steps)), len(found), tuple(rows[:MAX_PROMPTS]), note
    )


def _measured(
    deps: Dependencies, run: str, attempt: int | None, window: Window
) -> Iterator[tuple[int, int, dict[str, _Occurrence]]]:
    """Yield the newest current steps that were measured, each with its attempt_id and prompts."""
    attempts = deps.catalogue.attempts(run)
    lineage = Lineage(attempts)
    ids = [int(row["attempt_id"]) for row in attempts if attempt in (None, row["number"])]
    read = 0
    for state in sorted(deps.catalogue.step_states(ids, limit=None, **window), reverse=True,
                        key=lambda state: (state.step, state.attempt_id)):  # fmt: skip
        superseded = state.superseded_by or lineage.repeated_by(state.attempt_id, state.step)
        if attempt is None and superseded is not None:
            continue
        row = deps.catalogue.step(state.attempt_id, state.step)
        if row is None or row["step_summary"] is None:
            continue
        try:
            summary = StepSummary.from_bytes(row["step_summary"])
        except InvalidInput:  # of a version that cannot be read
            continue
        prompts = _prompts(deps, state.attempt_id, state.step, summary)
        yield state.step, state.attempt_id, prompts
        read += 1
        if read >= MAX_STEPS:
            return


def _prompts(
    deps: Dependencies, attempt_id: int, step: int, summary: StepSummary
) -> dict[str, _Occurrence]:
    keys, values = summary.summary.sequences.by_sample()
    # Samples without a token that counts have rows, too, and no key.
    rows = deps.catalogue.samples(attempt_id, step, limit=ALL_ROWS)
    prompt_of = {row["sample_uid"]: row["prompt_hash"] for row in rows if row["prompt_hash"]}
    tokens = float(values[:, _TOKENS].sum())
    mean = float(values[:, _ABS_SUM].sum()) / tokens if tokens else 0.0
    found: dict[str, _Occurrence] = {}
    for (sample, _, _), row in zip(keys, values.tolist(), strict=True):
        name = prompt_of.get(sample)
        if name is not None and row[_TOKENS]:
            own = found.get(name, _Occurrence(step, 0, 0.0, 0.0, 0.0))
            found[name] = _Occurrence(
                step, own.samples + 1, own.tokens + row[_TOKENS], own.abs_sum + row[_ABS_SUM],
                own.expected + row[_TOKENS] * mean,
            )  # fmt: skip
    return found


def _prompt(name: str, found: Sequence[_Occurrence]) -> Prompt:
    tokens = sum(each.tokens for each in found)
    size, expected = sum(each.abs_sum for each in found), sum(each.expected for each in found)
    return Prompt(
        name,
        tuple(sorted(each.step for each in found)),
        sum(each.samples for each in found),
        int(tokens),
        size / tokens,
        size / expected if expected else 0.0,
        sum(each.abs_sum >= TWICE * each.expected > 0.0 for each in found),
    )


# --- drawing --------------------------------------------------------------------------------
def figure(found: OffendersInfo) -> go.Figure:
    """Draw the ratio of each prompt as a bar, the worst on top."""
    title = "Prompts that differ more than their steps"
    x = "mean |d| over that of the prompt's steps"
    if not found.rows:
        return style.empty(title, found.note or "no prompt", x=x, y="prompt", height=320)
    rows = found.rows[::-1]
    drawn = go.Figure()
    drawn.add_bar(
        x=[row.ratio for row in rows], y=[row.prompt_hash for row in rows], orientation="h",
        hovertext=[_hover(row) for row in rows], hoverinfo="text", name="prompts",
        marker={"color": [style.VERMILLION if row.above > 1 else style.BLUE for row in rows]},
    )  # fmt: skip
    drawn.add_vline(x=1.0, line={"color": style.GREY, "dash": "dash", "width": 1.2})
    drawn.update_xaxes(title={"text": x}, rangemode="tozero")
    drawn.update_yaxes(
        title={"text": "prompt"}, type="category", automargin=True, tickmode="array",
        tickvals=[row.prompt_hash for row in rows],
        ticktext=[_short(row.prompt_hash) for row in rows],
    )  # fmt: skip
    return style.finished(drawn, title, 160 + 20 * len(rows))


def _short(name: str) -> str:
    return name if len(name) <= _LABEL else name[: _LABEL - 3] + "..."


def _hover(row: Prompt) -> str:
    return "<br>".join(
        (
            row.prompt_hash,
            f"mean |d| {style.number(row.mean_abs, 'nat')}, {row.ratio:.3g} times its steps'",
            f"{counted(row.tokens, 'token')} of {counted(row.samples, 'sample')}",
            f"in {ranges_text('step', list(row.steps))}, at least twice the mean in {row.above}",
        )
    )
