"""From the statistics of a step to the bodies of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from stagescope.wire.errors import NotFound
from stagescope_service.api.rows import layout_of
from stagescope_service.api.step_summaries import MeasuredStep
from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.checks import calibration
from stagescope_service.statistics.comparability import Comparability, examine_cell
from stagescope_service.statistics.mismatch import non_finite, publish_cell
from stagescope_service.statistics.summary import UNKNOWN, Slices, Summary, Tokens
from stagescope_service.store.parts import incarnation_of

Row = dict[str, Any]

COLUMNS: Final[Mapping[str, Callable[[Cell], float]]] = {
    "tokens": lambda cell: cell.tokens,
    "masked_tokens": lambda cell: cell.masked,
    "abs_diff_mean": lambda cell: cell.mean(Field.D_ABS_SUM),
    "abs_diff_max": lambda cell: cell.abs_max,
    "abs_diff_sum": lambda cell: cell[Field.D_ABS_SUM],
    "diff_sum": lambda cell: cell[Field.D_SUM],
    "probs_diff_mean": lambda cell: cell.mean(Field.A_SUM),
    "probs_diff_max": lambda cell: cell.extreme(Field.A_MAX),
    "kl": lambda cell: 0.0 - cell.mean(Field.D_SUM),
    "k3_kl": lambda cell: cell.mean(Field.K3_SUM),
    "pearson": lambda cell: cell.correlation(Field.U_M2, Field.V_M2, Field.UV_C),
    "mult_prob_error": lambda cell: cell.mean(Field.EXP_ABS_SUM),
    "ratio_mean": lambda cell: calibration(cell).mean,
    "calibration_z": lambda cell: calibration(cell).z,
    "over_0.1": lambda cell: cell[Field.ABS_OVER_0],
    "over_0.5": lambda cell: cell[Field.ABS_OVER_1],
    "over_1": lambda cell: cell[Field.ABS_OVER_2],
    "over_5": lambda cell: cell[Field.ABS_OVER_3],
}
"""The numbers of a cell in the rows of rounds and ranks: d = p - q in nats, counts in tokens."""

COUNTS: Final = frozenset({"tokens", "masked_tokens", "over_0.1", "over_0.5", "over_1", "over_5"})
SLICES: Final = ("round", "turn", "staleness")
NOT_FINITE: Final = "not finite"


def cell_row(cell: Cell, summary: Summary) -> Row:
    """Return a cell of a summary's tokens as the columns of a row."""
    pair = summary.pair
    row: Row = {
        name: int(column(cell)) if name in COUNTS else column(cell)
        for name, column in COLUMNS.items()
    }
    row["nonfinite"] = int(sum(non_finite(cell, *pair).values()))
    found = examine_cell(cell, pair, summary)
    return {**row, "comparable": found.verdict, "cause": found.cause}


def said_of(measured: MeasuredStep) -> Row:
    """Return what every answer about a step's numbers says beside them."""
    whole = measured.whole
    return {
        "stage": whole.stage,
        "role": _roles(measured),
        "pair": list(whole.summary.pair),
        "coverage": coverage(measured),
        **comparability(measured.comparability),
    }


def comparability(found: Comparability) -> Row:
    """Return whether two streams can be compared, and why not, the likeliest cause first."""
    return {
        "comparable": found.verdict,
        "cause": found.cause,
        "comparability": [
            {"code": check.name, "verdict": check.status, "text": check.text}
            for check in found.checks
            if check.status != "ok" or (check.name == "bitwise_equal" and found.verdict == "exact")
        ],
    }


def metrics(measured: MeasuredStep, number: int | None = None) -> Row:
    """Return the published numbers of a step, or of one of its rounds, and what they rest on.

    Raises:
        NotFound: no such round, with those that there are.
    """
    whole, summary = measured.whole, measured.whole.summary
    cell = summary.total if number is None else _round(summary, number)
    published = measured.published if number is None else publish_cell(cell, summary.pair)
    return {
        **said_of(measured),
        "round": number,
        "metrics": published,
        "noise_floor": measured.noise_floor,
        "nonfinite": nonfinite_counts(cell, summary.pair),
        "streams": measured.streams,
        "rollout_is": weights(summary),
        "differing": [list(keys) for keys in whole.differing],
    }


def coverage(measured: MeasuredStep) -> Row:
    """Return what the numbers cover: payloads by their end, tokens, and what was left out.

    `tokens` + all of `tokens_left_out` (reason -> tokens) = `tokens_sent`, the tokens under the
    mask in the payloads of the stage; `tokens_unaccounted` is what that lacks: 0, or a finding
    says it. Both are null where an earlier release aggregated the step.
    """
    whole, cell = measured.whole, measured.whole.total
    states = measured.payloads
    left_out: dict[str, int] = {}
    for why in whole.left_out.values():
        left_out[why] = left_out.get(why, 0) + 1
    tokens_left_out = dict(whole.tokens_left_out)
    if cell.masked > cell.tokens:
        tokens_left_out[NOT_FINITE] = cell.masked - cell.tokens
    return {
        "payloads_announced": sum(states.values()),
        **{f"payloads_{name}": states.get(name, 0) for name in ("ingested", "lost", "dropped")},
        "payloads_refused": states.get("refused", 0),
        "payloads_pending": states.get("announced", 0),
        "tokens": cell.tokens,
        "masked_tokens": cell.masked,
        "tokens_sent": whole.sent,
        "tokens_left_out": tokens_left_out,
        "tokens_unaccounted": whole.unaccounted,
        "sequences": len(whole.summary.sequences.by_sample()[0]),
        "empty_rows": whole.summary.empty_rows,
        "parts_counted": len(whole.counted),
        "parts_left_out": left_out,
        "duplicates_left_out": whole.duplicates,
        "parts_to_restate": len(whole.restate),
        "fragmented_sequences": whole.fragmented,
    }


def weights(summary: Summary) -> Row:
    """Return whose importance weights `rollout_corr/rollout_is_*` describe."""
    settings = summary.settings
    if settings.rollout_is is None:
        text = "the run said no rollout_is: the weights are e^(old - rollout), untruncated"
    else:
        text = f"the run's own weights, by {settings.rollout_is}"
    return {
        "rollout_is": settings.rollout_is,
        "threshold": settings.rollout_is_threshold,
        "batch_normalize": settings.rollout_is_batch_normalize,
        "truncated": settings.rollout_is is not None,
        "text": text,
    }


def nonfinite_counts(cell: Cell, pair: tuple[str, str]) -> dict[str, dict[str, int]]:
    """Return stream -> kind -> tokens under the mask."""
    found: dict[str, dict[str, int]] = {}
    for name, count in non_finite(cell, *pair).items():
        stream, _, kind = name.removeprefix("nonfinite/").rpartition("_")
        found.setdefault(stream, {})[kind] = int(count)
    return found


def slice_rows(summary: Summary, by: str) -> list[Row]:
    """Return a row for each round, turn or staleness."""
    slices: Slices = {
        "round": summary.rounds,
        "turn": summary.turns,
        "staleness": summary.staleness,
    }[by]
    return [{by: key, **cell_row(cell, summary)} for key, cell in slices.items()]


def rank_rows(measured: MeasuredStep, processes: Iterable[Row]) -> list[Row]:
    """Return each rank's own numbers, also where they do not count, and where the rank ran."""
    newest: dict[tuple[str, int], Row] = {}
    counted = {incarnation_of(key) for key in (*measured.whole.counted, *measured.whole.left_out)}
    for process in processes:
        if process["incarnation"] in counted:
            newest[process["role"], process["rank"]] = process
    rows = []
    for rank in measured.whole.ranks:
        process = newest.get((rank.role, rank.rank), {})
        rows.append(
            {
                "stage": measured.whole.stage,
                "role": rank.role,
                "rank": rank.rank,
                "parts": rank.parts,
                "parts_counted": rank.counted_parts,
                **cell_row(rank.cell, measured.whole.summary),
                **layout_of(process),
            }
        )
    return rows


def token_rows(measured: MeasuredStep, processes: Iterable[Row]) -> list[Row]:
    """Return the worst tokens, |d| descending, then the non-finite ones."""
    summary = measured.whole.summary
    places = {row["incarnation"]: (row["role"], row["rank"]) for row in processes}
    return [
        *_tokens("worst", summary.worst, summary, places),
        *_tokens("nonfinite", summary.non_finite, summary, places),
    ]


def _tokens(
    kind: str, tokens: Tokens, summary: Summary, places: Mapping[str, tuple[str, int]]
) -> list[Row]:
    rows = []
    sequences = summary.sequences
    for at in range(len(tokens)):
        sequence = int(tokens.sequence[at])
        key = summary.sources[int(sequences.source[sequence])]
        role, rank = places.get(incarnation_of(key), (None, None))
        p, q = float(tokens.p[at]), float(tokens.q[at])
        rows.append(
            {
                "kind": kind,
                "abs_diff": abs(p - q) if math.isfinite(p) and math.isfinite(q) else None,
                "p": p,
                "q": q,
                "round": int(tokens.round[at]),
                "turn": _known(int(tokens.turn[at])),
                "token_id": _known(int(tokens.token_id[at])),
                "sample_uid": sequences.samples[sequence] or None,
                "row": int(sequences.row[sequence]),
                "position": int(tokens.position[at]),
                "role": role,
                "rank": rank,
            }
        )
    return rows


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _round(summary: Summary, number: int) -> Cell:
    cell = summary.rounds.get(number)
    if cell is None:
        there = [int(key) for key in summary.rounds.keys]
        raise NotFound(
            f"there is no round {number}",
            expected=f"one of {', '.join(map(str, there[:20]))}" if there else "",
        )
    return cell


def _roles(measured: MeasuredStep) -> str | None:
    """Return the role whose parts counted: one, or several joined by a comma."""
    roles = dict.fromkeys(rank.role for rank in measured.whole.ranks if rank.counted_parts)
    return ",".join(roles) or None
