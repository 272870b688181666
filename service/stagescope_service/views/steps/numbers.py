"""The numbers of a step: metrics, rounds, ranks and tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Literal, TypedDict

from stagescope_service.statistics.cell import Cell, Field
from stagescope_service.statistics.comparability import (
    Comparability,
    examine_cell,
    examine_cells,
)
from stagescope_service.statistics.mismatch import non_finite, publish_cell
from stagescope_service.statistics.noise_checks import calibration
from stagescope_service.statistics.step_metrics import VERSION
from stagescope_service.statistics.summary import UNKNOWN, Slices, Summary, Tokens
from stagescope_service.store.parts import incarnation_of
from stagescope_service.store.tables import ProcessColumns
from stagescope_service.views.encoding import JsonObject
from stagescope_service.views.models.numbers import Coverage
from stagescope_service.views.pages import Page
from stagescope_service.views.reading.dependencies import Dependencies, RankQuery
from stagescope_service.views.reading.rows import layout_of, matching
from stagescope_service.views.reading.step_summaries import MeasuredSummary, Slice
from stagescope_service.views.reading.target import Target
from stagescope_service.views.reading.tokenizers import Tokenizers
from stagescope_service.views.steps.listing import begun_again_in, gap_of, progress_of
from stagescope_wire.errors import NotFound
from stagescope_wire.names import unit_of_metric
from stagescope_wire.render import ranges_text

SliceBy = Literal["round", "turn", "staleness"]

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

NOT_FINITE: Final = "not finite"

_DOUBTED: Final = ("suspect", "not measured", "unknown")
"""Verdicts of steps whose mismatch is not, or may not be, the engine's numerics alone."""

_UNKNOWN: Final = "whether the streams can be compared is unknown"


class ComparabilityFields(TypedDict):
    """Whether the streams can be compared; see `models.numbers.Numbers`."""

    comparable: str
    cause: str | None
    comparability: list[dict[str, str]]


def _add_texts(deps: Dependencies, target: Target, rows: Sequence[JsonObject]) -> str | None:
    """Give rows of tokens their texts; return why they have none."""
    ids = [row["token_id"] for row in rows if row["token_id"] is not None]
    tokenizer = Tokenizers.of_attempt(deps, target.attempt_id) if ids else None
    texts = None if tokenizer is None else tokenizer.texts(ids)
    by_id = dict(zip(ids, texts or (), strict=False))
    for row in rows:
        row["text"] = by_id.get(row["token_id"])
    if tokenizer is None:
        return "token ids were not recorded: record responses" if rows else None
    return tokenizer.reason


def metrics_of(
    deps: Dependencies,
    target: Target,
    part: Slice = Slice(),  # noqa: B008
    round: int | None = None,
) -> JsonObject:
    """Return the answer of `/steps/{step}/metrics`; the API's actor returns the same.

    Raises:
        NotFound: nothing of that stage, role, rank or round was measured (yet).
    """
    heading = heading_of(deps, target)
    measured, step = measure(deps, target, part)
    return {**heading, **metrics_fields(measured, step, round)}


def measure(
    deps: Dependencies, target: Target, part: Slice
) -> tuple[MeasuredSummary, Comparability]:
    """Return the statistics of a part of a step, and whether the step's streams can be compared."""
    measured = deps.step_summaries.measure(target.attempt_id, target.step_row, part)
    if part == Slice():
        return measured, measured.comparability
    of_step = deps.step_summaries.measure(target.attempt_id, target.step_row)
    return measured, of_step.comparability


def heading_of(deps: Dependencies, target: Target) -> JsonObject:
    """Return the first fields of answers about numbers: the step, and how complete it is.

    It is read before the numbers. So a rank that arrives between the two reads is missing in an
    answer that has its tokens, never present in one that lacks them.
    """
    step = target.step_row
    complete, missing = step["completeness"] or "unknown", []
    if step["closed_wall"] is None or step["missing"]:
        # Stages are read only where a rank is missing: when others began decides `since`.
        progress = progress_of(deps, target)[1]
        complete, missing = progress.complete, progress.missing
    return {
        **target.heading(),
        "complete": complete,
        "missing": missing,
        "gap": gap_of(deps, target),
        "begun_again": begun_again_in(deps, target),
    }


def cell_row(
    cell: Cell, summary: Summary, step: Comparability, own: Comparability | None = None
) -> JsonObject:
    """Return the numbers of a cell of a summary's tokens, as the columns of a row.

    Args:
        cell: the tokens.
        summary: holds them.
        step: whether the streams of their step can be compared.
        own: whether their own streams can be compared; by default as the cell shows.
    """
    row: JsonObject = {
        name: int(column(cell)) if name in COUNTS else column(cell)
        for name, column in COLUMNS.items()
    }
    row["nonfinite"] = int(sum(non_finite(cell, *summary.pair).values()))
    checked = own or examine_cell(cell, summary, summary.produced)
    return {
        **row,
        "comparable": checked.verdict,
        "cause": _cause(checked, step),
        "step_comparable": step.verdict,
    }


def _cause(checked: Comparability, step: Comparability) -> str | None:
    """Return the likeliest cause in some tokens of a step."""
    if checked.cause == "unrelated" and step.cause == "shifted":
        # Samples that are shifted spoil the correlation of every round that holds some of them.
        return step.cause
    return checked.cause


def numbers_context(measured: MeasuredSummary, step: Comparability) -> JsonObject:
    """Return the fields that accompany every answer about a step's numbers."""
    summary = measured.summary
    return {
        "stage": summary.stage,
        "role": _roles(measured),
        "pair": list(summary.summary.pair),
        "coverage": coverage(measured),
        **comparability_fields(measured.comparability),
        "step_comparable": step.verdict,
        "step_cause": step.cause,
    }


def comparability_fields(result: Comparability | None) -> ComparabilityFields:
    """Return whether two streams can be compared, and the reasons against, likeliest first.

    None: the step has no numbers.
    """
    if result is None:
        return {"comparable": "unknown", "cause": None, "comparability": []}
    return {
        "comparable": result.verdict,
        "cause": result.cause,
        "comparability": [
            {"code": check.name, "verdict": check.status, "text": check.text}
            for check in result.checks
            if check.status != "ok"
            or (check.name == "bitwise_equal" and result.verdict in ("exact", "not measured"))
        ],
    }


def doubt(result: Comparability) -> str | None:
    """Return why a mismatch may not be the engine's numerics alone, as a sentence; None: it is."""
    if result.verdict not in _DOUBTED:
        return None
    if result.verdict == "unknown":
        missing = "; ".join(f"{check.name} {check.text}" for check in result.undecided)
        return f"{_UNKNOWN}: {missing}"
    equal = (check for check in result.checks if check.name == "bitwise_equal")
    return f"the streams are {result.verdict}: {next(iter((*result.suspects, *equal))).text}"


def doubted_steps(deps: Dependencies, attempts: Mapping[int, int]) -> list[str]:
    """Return in which steps the mismatch may not be the engine's numerics alone, a text a verdict.

    Args:
        deps: of the service.
        attempts: step -> attempt_id of the attempt that answers for it.
    """
    if not attempts:
        return []
    found: dict[str, list[int]] = {verdict: [] for verdict in _DOUBTED}
    for row in deps.catalogue.step_metrics(
        sorted(set(attempts.values())),
        version=VERSION,
        numbers=None,
        first=min(attempts),
        last=max(attempts),
    ):
        if attempts.get(row["step"]) == row["attempt_id"] and row["verdict"] in found:
            found[row["verdict"]].append(row["step"])
    return [
        f"{_UNKNOWN if verdict == 'unknown' else f'the streams are {verdict}'} in "
        f"{ranges_text('step', sorted(steps))}"
        for verdict, steps in found.items()
        if steps
    ]


def metrics_fields(
    measured: MeasuredSummary, step: Comparability, round: int | None = None
) -> JsonObject:
    """Return the published numbers of a step, or of one of its rounds, and what they rest on.

    Raises:
        NotFound: no such round; names those that exist.
    """
    step_summary, summary = measured.summary, measured.summary.summary
    cell = summary.total if round is None else _cell_of_round(summary, round)
    published = measured.published if round is None else publish_cell(cell, summary.pair)
    context = numbers_context(measured, step)
    if round is not None:  # as in the row of that round
        own = examine_cell(cell, summary, summary.produced)
        context |= {**comparability_fields(own), "cause": _cause(own, step)}
    return {
        **context,
        "round": round,
        "metrics": published,
        "units": {name: unit for name in published if (unit := unit_of_metric(name))},
        "noise_floor": measured.noise_floor,
        "nonfinite": nonfinite_counts(cell, summary.pair),
        "streams": measured.streams,
        "rollout_is": importance_weights(summary),
        "differing": [list(keys) for keys in step_summary.differing],
    }


def coverage(measured: MeasuredSummary) -> Coverage:
    """Return what the numbers cover: payloads by state, tokens, and what was left out.

    `tokens` + all of `tokens_left_out` (reason -> tokens) = `tokens_sent`, the tokens under the
    mask in the payloads of the stage. `tokens_unaccounted` is the difference: 0, or a finding
    describes it.
    """
    summary, cell = measured.summary, measured.summary.total
    states = measured.payloads
    tokens_left_out = dict(summary.tokens_left_out)
    if cell.masked > cell.tokens:
        tokens_left_out[NOT_FINITE] = cell.masked - cell.tokens
    found: Coverage = {
        "payloads_announced": sum(states.values()),
        "payloads_ingested": states.get("ingested", 0),
        "payloads_lost": states.get("lost", 0),
        "payloads_dropped": states.get("dropped", 0),
        "payloads_refused": states.get("refused", 0),
        "payloads_pending": states.get("announced", 0),
        "tokens": cell.tokens,
        "masked_tokens": cell.masked,
        "tokens_sent": summary.sent,
        "tokens_left_out": tokens_left_out,
        "tokens_unaccounted": summary.unaccounted,
        "sequences": len(summary.summary.sequences.by_sample()[0]),
        "empty_rows": summary.summary.empty_rows,
        "parts_counted": len(summary.counted),
        "parts_left_out": dict(Counter(summary.left_out.values())),
        "duplicates_left_out": summary.duplicates,
        "parts_to_restate": len(summary.to_recompute),
        "fragmented_sequences": summary.fragmented,
    }
    if summary.summary.ignored:
        found["ignored_tensors"] = list(summary.summary.ignored)
    return found


def importance_weights(summary: Summary) -> JsonObject:
    """Return whose importance weights `rollout_corr/rollout_is_*` describe."""
    settings = summary.settings
    if settings.rollout_is is None:
        text = "the run has no setting rollout_is: the weights are e^(old - rollout), untruncated"
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
    counts: dict[str, dict[str, int]] = {}
    for name, count in non_finite(cell, *pair).items():
        stream, _, kind = name.removeprefix("nonfinite/").rpartition("_")
        counts.setdefault(stream, {})[kind] = int(count)
    return counts


def slice_rows(
    summary: Summary, step: Comparability, by: SliceBy, first: int, most: int
) -> list[JsonObject]:
    """Return a row for each round, turn or staleness, from the index `first` on, at most `most`."""
    slices: Slices = {
        "round": summary.rounds,
        "turn": summary.turns,
        "staleness": summary.staleness,
    }[by]
    shown = slices.items()[first : first + most]
    own = examine_cells([cell for _, cell in shown], summary, summary.produced)
    return [
        {by: key, **cell_row(cell, summary, step, checked)}
        for (key, cell), checked in zip(shown, own, strict=True)
    ]


def rank_rows(
    measured: MeasuredSummary, step: Comparability, processes: Iterable[ProcessColumns]
) -> list[JsonObject]:
    """Return the numbers of each rank, even of those that do not count, and where it ran."""
    summary = measured.summary
    newest: dict[tuple[str, int], ProcessColumns] = {}
    incarnations = {incarnation_of(key) for key in (*summary.counted, *summary.left_out)}
    for process in processes:
        if process["incarnation"] in incarnations:
            newest[process["role"], process["rank"]] = process
    return [
        {
            "stage": summary.stage,
            "role": rank.role,
            "rank": rank.rank,
            "parts": rank.parts,
            "parts_counted": rank.counted_parts,
            **cell_row(rank.cell, summary.summary, step, own),
            **layout_of(newest.get((rank.role, rank.rank))),
        }
        for rank, own in zip(summary.ranks, measured.rank_comparability, strict=True)
    ]


def token_rows(measured: MeasuredSummary, processes: Iterable[ProcessColumns]) -> list[JsonObject]:
    """Return the worst tokens, |d| descending, then the non-finite ones."""
    summary = measured.summary.summary
    ranks = {row["incarnation"]: (row["role"], row["rank"]) for row in processes}
    return [
        *_token_rows("worst", summary.worst, summary, ranks),
        *_token_rows("nonfinite", summary.non_finite, summary, ranks),
    ]


def _token_rows(
    kind: str, tokens: Tokens, summary: Summary, ranks: Mapping[str, tuple[str, int]]
) -> list[JsonObject]:
    """Return a row a token.

    Args:
        kind: of the rows.
        tokens: to list.
        summary: which they belong to.
        ranks: incarnation -> (role, rank).
    """
    rows: list[JsonObject] = []
    sequences = summary.sequences
    for index in range(len(tokens)):
        sequence = int(tokens.sequence[index])
        key = summary.sources[int(sequences.source[sequence])]
        role, rank = ranks.get(incarnation_of(key), (None, None))
        p, q = float(tokens.p[index]), float(tokens.q[index])
        rows.append(
            {
                "kind": kind,
                "abs_diff": abs(p - q) if math.isfinite(p) and math.isfinite(q) else None,
                "p": p,
                "q": q,
                "round": int(tokens.round[index]),
                "turn": _none_if_unknown(int(tokens.turn[index])),
                "token_id": _none_if_unknown(int(tokens.token_id[index])),
                "sample_uid": sequences.samples[sequence] or None,
                "row": int(sequences.row[sequence]),
                "position": int(tokens.position[index]),
                "role": role,
                "rank": rank,
            }
        )
    return rows


def _none_if_unknown(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _cell_of_round(summary: Summary, round: int) -> Cell:
    cell = summary.rounds.get(round)
    if cell is None:
        rounds = [int(key) for key in summary.rounds.keys]
        raise NotFound(
            f"there is no round {round}",
            expected=f"one of {', '.join(map(str, rounds[:20]))}" if rounds else "",
        )
    return cell


def _roles(measured: MeasuredSummary) -> str | None:
    """Return the role whose parts counted: one, or several joined by a comma."""
    roles = dict.fromkeys(rank.role for rank in measured.summary.ranks if rank.counted_parts)
    return ",".join(roles) or None


def rounds(
    deps: Dependencies, target: Target, page: Page, ranks: RankQuery, by: SliceBy = "round"
) -> JsonObject:
    """List the mismatch by round; `tokens`, `abs_diff_sum` and `diff_sum` add up to `whole`."""
    heading = heading_of(deps, target)
    measured, step = measure(deps, target, Slice(**ranks))
    summary = measured.summary.summary
    return {
        **heading,
        **numbers_context(measured, step),
        "by": by,
        **({"turns": len(summary.turns.keys)} if len(summary.turns.keys) else {}),
        "whole": cell_row(summary.total, summary, step),
        **page.first_of(slice_rows(summary, step, by, page.offset, page.limit + 1)),
    }


def ranks(deps: Dependencies, target: Target, page: Page, ranks: RankQuery) -> JsonObject:
    """List the mismatch by rank, with where each ran."""
    heading = heading_of(deps, target)
    measured, step = measure(deps, target, Slice(ranks["stage"]))
    rows = rank_rows(measured, step, deps.catalogue.processes(target.attempt_id))
    rows = matching(rows, f"step {target.step_number}", role=ranks["role"], rank=ranks["rank"])
    return {**heading, **numbers_context(measured, step), **page.cut(rows)}


def tokens(
    deps: Dependencies,
    target: Target,
    page: Page,
    ranks: RankQuery,
    round: int | None = None,
    kind: Literal["worst", "nonfinite"] | None = None,
) -> JsonObject:
    """List the worst tokens (|p - q| descending), then those whose p or q is not finite."""
    heading = heading_of(deps, target)
    measured, step = measure(deps, target, Slice(**ranks))
    rows = token_rows(measured, deps.catalogue.processes(target.attempt_id))
    if kind is not None:
        rows = [row for row in rows if row["kind"] == kind]
    if round is not None:
        _cell_of_round(measured.summary.summary, round)  # raises where there is none
        rows = [row for row in rows if row["round"] == round]
    shown = page.cut(rows)
    reason = _add_texts(deps, target, shown["rows"])
    return {**heading, **numbers_context(measured, step), "texts_reason": reason, **shown}
