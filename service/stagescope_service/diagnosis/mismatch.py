"""Evidence of the mismatch: by rank, round and staleness, and of the streams themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from stagescope.batch import Batch
from stagescope.batch.trajectories import keys_of, prompts_of, response_spans
from stagescope.wire.tensorfile import Array
from stagescope_service.diagnosis.evidence import (
    ABS_DIFF,
    Evidence,
    event_period,
    not_found,
    not_measured,
    short,
    spearman,
)
from stagescope_service.diagnosis.history import NEWEST, READ, RunHistory
from stagescope_service.diagnosis.trends import of_rate
from stagescope_service.statistics.cell import Float64, Int64
from stagescope_service.statistics.profiles import (
    COARSEST,
    FINER,
    NOT_FINITE,
    ZERO,
    exponent,
)

_OF_THE_MEAN: Final = {"renormalised", "temperature", "calibration"}
"""Checks of whether another distribution sampled the tokens."""
_LASTING: Final = 3
"""Newest steps of which one has to be suspect."""
_AT_EDGES: Final = ("first_token", "last_token")
"""Checks of the tokens at the edges of rounds, which alone can fail those."""
_TURNS: Final = (("prompts", "responses", "turn_ids"), ("tokens", "loss_mask", "turn_ids"))
"""The tensors that hold the tokens of a turn and of its prompt, either way."""


def rank_apart(
    history: RunHistory, *, metric: str = ABS_DIFF, factor: float = 3.0, least: int = 3
) -> Evidence:
    """Return the rank whose metric is `factor` times the others' median, step after step.

    Of two ranks it is the one with the higher value, in half of the steps at least.
    """
    slices = history.slices("rank", metric)
    slices = [(step, values) for step, values in slices if len(values) >= 2]
    if len(slices) < least:
        return not_measured(
            f"{len(slices)} of the newest steps have two or more ranks with {metric}"
        )
    apart: Counter[tuple[str | None, int]] = Counter()
    first: dict[tuple[str | None, int], int] = {}
    for step, values in slices:
        known = {name: value for name, value in values.items() if not math.isnan(value)}
        if len(known) < 2:
            continue
        key = max(known, key=lambda name: known[name])  # no other can be 1.5 times all others
        value = known.pop(key)
        others = np.array([*known.values()])
        if value > factor * float(np.median(others)) and value > 1.5 * float(others.max()):
            apart[key] += 1
            first.setdefault(key, step.step)
    if not apart:
        return not_found(f"no rank is {factor:g} times the others in {len(slices)} steps")
    (role, rank), count = apart.most_common(1)[0]
    step, values = slices[-1]
    rest = [value for key, value in values.items() if key != (role, rank)]
    newest = values.get((role, rank), math.nan)
    text = (
        f"{role} {rank} stands apart in {count} of {len(slices)} steps: {metric} is "
        f"{short(newest)} in step {step.step}, {short(float(np.nanmedian(rest)))} at the "
        f"other{'' if len(rest) == 1 else 's'}"
    )
    if count < least or (len(values) == 2 and 2 * count < len(slices)):
        return not_found(text)
    since = first[role, rank]
    return Evidence("found", count / len(slices), since, f"{role} rank {rank}", (text,))


def rounds_rise(
    history: RunHistory,
    *,
    metric: str = ABS_DIFF,
    factor: float = 2.0,
    tokens: int = 64,
    share: float = 0.7,
) -> Evidence:
    """Return whether a metric rises with the round, and more than its tokens grow less sure.

    In `share` of the newest steps Spearman's rank correlation with the round is at least 0.8, and
    the last round has `factor` times the first one's; so does the metric divided by the mean of -q.
    The same noise of the logits makes |d| larger where a token is less sure (arXiv 2512.23087), and
    later rounds of a healthy run often are.
    """
    rises, explained, examined, since, newest = 0, 0, 0, None, ""
    counts = dict(history.slices("round", "counts/tokens"))
    rollout = "rollout" if history.newest is None else history.newest.summary.summary.pair[1]
    sampled = dict(history.slices("round", f"logprob/{rollout}_mean"))
    for step, values in history.slices("round", metric):
        sizes, means = counts.get(step, {}), sampled.get(step, {})
        rounds = [key for key in sorted(values) if sizes.get(key, 0) >= tokens]
        numbers = np.array([values[key] for key in rounds])
        if len(rounds) < 3 or not np.isfinite(numbers).all():
            continue
        examined += 1
        newest = (
            f"step {step.step}: {short(float(numbers[0]))} in round {rounds[0][1]}, "
            f"{short(float(numbers[-1]))} in round {rounds[-1][1]}"
        )
        if not _rises(numbers, factor):
            continue
        unsure = np.array([-means.get(key, math.nan) for key in rounds])
        if (unsure > 0.0).all() and not _rises(numbers / unsure, factor):
            explained += 1
            continue
        rises += 1
        since = step.step if since is None else since
    if not examined:
        return not_measured(f"no step has three rounds of {tokens} tokens")
    text = f"{metric} rises with the round in {rises} of {examined} steps; {newest}"
    if explained:
        text += f"; in {explained} more, as their tokens grow less sure"
    if rises < share * examined:
        return not_found(text)
    return Evidence("found", rises / examined, since, "the later rounds", (text,))


def _rises(numbers: Float64, factor: float) -> bool:
    return spearman(numbers) >= 0.8 and bool(numbers[-1] >= factor * numbers[0])


def suspect(history: RunHistory, *, checks: Sequence[str], steps: int = 20) -> Evidence:
    """Return whether the checks of a step's streams name one of these causes, in one of the newest
    three steps."""
    measured = history.measured
    newest = measured[-steps:]
    if history.newest is None or not newest:
        return not_measured("no step has both streams")
    marks = np.array([bool(set(checks) & set(step.suspects)) for step in measured])
    at_edges = [each.text for each in history.newest.comparability.checks if each.name in _AT_EDGES]
    if at_edges and set(checks) <= _OF_THE_MEAN:
        return not_found(f"step {history.newest.step.step}: {at_edges[0]}")
    period = event_period(marks, _LASTING)
    if period is None:
        verdicts = Counter(step.verdict for step in newest)
        listed = ", ".join(f"{verdict} {number}" for verdict, number in verdicts.items())
        return not_found(f"the streams of the newest {len(newest)} steps: {listed}")
    found = history.newest.comparability
    texts = [
        check.text for check in found.checks if check.name in checks and check.status == "suspect"
    ]
    share = float(marks[-steps:].mean())
    lines = (f"named in {int(marks[-steps:].sum())} of the newest {len(newest)} steps", *texts)
    likelier = [] if found.cause in (*checks, None) else [f"{found.cause} is the likelier cause"]
    where = ", ".join(sorted(set(_ranks_named(texts))))
    since = measured[period.first].step
    return Evidence("found", share, since, where, lines, tuple(likelier))


def _ranks_named(texts: Sequence[str]) -> list[str]:
    return [word for text in texts for word in text.split("; ") if word.startswith("rank ")]


def noise_floor(history: RunHistory, *, factor: float = 1.5) -> Evidence:
    """Return whether the mismatch is no larger than the trainer's against itself."""
    newest = history.newest
    if newest is None or newest.noise is None:
        return not_measured("no recomputed log-probs: the trainer is not held against itself")
    mismatch, noise = newest.published[ABS_DIFF], newest.noise[ABS_DIFF]
    text = (
        f"step {newest.step.step}: mean |d| is {short(mismatch)}, that of the trainer against "
        f"itself {short(noise)}"
    )
    if not mismatch <= factor * noise:
        return not_found(text)
    sure = min(1.0, noise / mismatch) if mismatch else 1.0
    return Evidence("found", sure, newest.step.step, "", (text,))


def rounded(history: RunHistory, *, share: float = 0.5) -> Evidence:
    """Return whether a stream's dtype alone explains the mismatch, or most of it."""
    newest = history.newest
    if newest is None:
        return not_measured("no step has both streams")
    floor, mismatch = newest.published["rounding/abs_diff_floor"], newest.published[ABS_DIFF]
    dtypes = {name: ", ".join(each) for name, each in newest.summary.summary.dtypes.items()}
    listed = ", ".join(f"{name} in {dtype}" for name, dtype in dtypes.items())
    text = (
        f"step {newest.step.step}: rounding adds about {short(floor)} to a mean |d| of "
        f"{short(mismatch)} ({listed})"
    )
    if not (mismatch > 0 and floor >= share * mismatch):
        return not_found(text)
    return Evidence("found", min(1.0, floor / mismatch), newest.step.step, "", (text,))


def engine_apart(
    history: RunHistory, *, factor: float = 3.0, tokens: int = 256, least: int = 2
) -> Evidence:
    """Return the engine instance whose mean |d| is `factor` times the others', in each step.

    Each of the newest `READ` steps must show it, over `tokens` tokens of it and of the others.
    """
    apart: list[tuple[int, str, float, float]] = []
    examined = 0
    for step, summary in history.summaries:
        sums = {name: row for name, row in summary.engines.items() if row[0] >= tokens}
        if len(sums) < least:
            continue
        examined += 1
        means = {name: float(row[3] / row[0]) for name, row in sums.items()}
        worst = max(means, key=lambda name: means[name])
        others = [row for name, row in sums.items() if name != worst]
        usual = float(sum(row[3] for row in others) / sum(row[0] for row in others))
        if means[worst] > factor * usual:
            apart.append((step.step, worst, means[worst], usual))
    if examined < READ:
        return not_measured(
            f"{examined} of the newest steps have {tokens} tokens of each of two engine instances"
        )
    if len(apart) < READ or len({name for _, name, *_ in apart}) > 1:
        return not_found(f"no engine instance is {factor:g} times the others in each step")
    step_number, name, mean, usual = apart[0]
    text = (
        f"step {step_number}: mean |d| is {short(mean)} over the tokens that {name} sampled, "
        f"{short(usual)} over the others'"
    )
    return Evidence("found", 1.0, apart[-1][0], name, (text,))


def first_token(history: RunHistory, *, factor: float = 3.0, tokens: int = 32) -> Evidence:
    """Return whether the first tokens of rounds differ `factor` times as much as the others.

    Each of the newest `READ` steps must show it, over `tokens` first tokens at least.
    """
    rows = []
    for step, summary in history.summaries:
        found = None if summary.profiles is None else summary.profiles.edge_tokens("first")
        if found is not None and found[0].tokens >= tokens:
            mean, others = (each.d_abs_sum / each.tokens for each in found)
            rows.append((step.step, found[0].tokens, mean, others))
    if len(rows) < READ:
        return not_measured(
            f"{len(rows)} of the newest steps have {tokens} first tokens of rounds with numbers"
        )
    newest, count, mean, others = rows[0]
    text = (
        f"step {newest}: mean |d| is {short(mean)} over the {count} first tokens of rounds, "
        f"{short(others)} over the others"
    )
    if not all(row[2] > factor * row[3] for row in rows):
        return not_found(text)
    return Evidence("found", 1.0, rows[-1][0], "the first token of each round", (text,))


def lattice(history: RunHistory, *, share: float = 0.5, tokens: int = 64) -> Evidence:
    """Return whether `share` of the differences are multiples of a power of two.

    Differences of values that were rounded to a narrow dtype are; of float32 log-probs about one in
    2000 is by chance.
    """
    for step, summary in history.summaries:
        bins = () if summary.profiles is None else summary.profiles.bins("lattice")
        bins = tuple(each for each in bins if each.key not in (ZERO, NOT_FINITE))
        count = sum(each.tokens for each in bins)
        if count < tokens:
            continue
        on, power = 0, COARSEST
        coarsest_first = sorted(bins, key=lambda each: -each.key)
        for each in (each for each in coarsest_first if each.key > FINER):
            on, power = on + each.tokens, each.key
            if on >= share * count:
                break
        text = (
            f"step {step.step}: {on / count:.0%} of the {count} differences other than 0 are a "
            f"multiple of 2^{exponent(power)} = {2.0 ** exponent(power):g} nat"
        )
        if on < share * count:
            return not_found(text)
        return Evidence("found", on / count, step.step, "", (text,))
    return not_measured(f"no step has {tokens} tokens that differ, with profiles of d")


def hidden_tails(history: RunHistory, *, mean: float = 0.01, tail: float = 5.0) -> Evidence:
    """Return whether means look healthy while single tokens are far off.

    `training/rollout_probs_diff_mean` is below `mean` and `logprob_abs_diff/max` over `tail` nats:
    improbable tokens hardly move probabilities.
    """
    means, largest = (
        history.metric(name)
        for name in ("training/rollout_probs_diff_mean", "logprob_abs_diff/max")
    )
    if not len(means) or len(means) != len(largest):
        return not_measured("no step has both streams")
    marks = (means.values < mean) & (largest.values > tail)
    share = history.metric("tail/abs_diff_over_1_share").newest(NEWEST)
    text = (
        f"|d| is up to {short(float(np.nanmax(largest.newest(NEWEST).values)))} nat while the "
        f"mean of |e^p - e^q| is {short(float(np.nanmedian(means.newest(NEWEST).values)))}; "
        f"{short(float(np.nanmedian(share.values)))} of the tokens are over 1 nat"
    )
    return of_rate(means.steps, marks, None, 0.5, NEWEST, text)


def stale(history: RunHistory, *, metric: str = ABS_DIFF, factor: float = 1.5) -> Evidence:
    """Return whether tokens of older policy versions have a larger mismatch than fresh ones."""
    slices = history.slices("staleness", metric)
    counts = dict(history.slices("staleness", "counts/tokens"))
    rows = []
    for step, values in slices:
        sizes = counts.get(step, {})
        fresh = values.get((None, 0), math.nan)
        old = [(sizes[key], value) for key, value in values.items() if key[1] > 0]
        total = sum(sizes.values())
        if old and total:
            weight = sum(size for size, _ in old)
            mean = sum(size * value for size, value in old) / weight if weight else math.nan
            rows.append((step.step, weight / total, mean, fresh))
    if not slices or not any(len(values) for _, values in slices):
        return not_measured(
            "policy versions of the tokens, or of the stage that scores them, are not recorded, or "
            "are texts that do not differ in one number"
        )
    if not rows:
        return not_found("all tokens were sampled by the trainer's own version")
    share = float(np.median([row[1] for row in rows]))
    newest, _, mean, fresh = rows[-1]
    text = (
        f"{share:.0%} of the tokens are of an older version; in step {newest} their mean |d| is "
        f"{short(mean)}, that of fresh ones {short(fresh)}"
    )
    larger = [row for row in rows if not row[3] * factor > row[2]]
    if len(larger) * 2 < len(rows):
        return not_found(text)
    return Evidence("found", len(larger) / len(rows), rows[0][0], "", (text,))


def retokenised(history: RunHistory, *, share: float = 0.01) -> Evidence:
    """Return whether the prompt of a turn does not begin with the turn before it.

    Rows of one group_id and run_id are turns of one trajectory where each row has a single turn_id.
    Those of the newest `READ` steps whose tokens are kept are read; `share` of their follow-up
    prompts have to differ.
    """
    if history.kept is None:
        return not_measured("tensors cannot be read here")
    pairs, read = 0, 0
    breaks: list[tuple[int, int, int, _Turn, _Turn]] = []
    for step in reversed(history.steps[-NEWEST:]):
        batches = (history.kept.batch(step, names) for names in _TURNS)
        batch = next((each for each in batches if each is not None), None)
        if batch is None:
            continue
        read += 1
        for before, after in _following(batch):
            pairs += 1
            at = _first_difference(before, after)
            if at is not None:
                breaks.append((after.turn, at, step.step, before, after))
        if read == READ:
            break
    if not read:
        return not_measured("no prompts and responses are kept of the newest steps")
    if not pairs:
        return not_measured(
            "each row holds a whole trajectory, or one whose other turns are absent"
        )
    text = (
        f"{len(breaks)} of {pairs} prompts of later turns, in {read} steps, do not begin with the "
        "turn before"
    )
    if not breaks or len(breaks) < share * pairs:
        return not_found(text)
    turn, at, step_number, before, after = min(breaks, key=lambda each: each[:3])
    first = (
        f"first in turn {turn} at position {at} (step {step_number}, group {after.group}, run "
        f"{after.run}): token {_id_at(after.given, at)} where turn {before.turn} has "
        f"{_id_at(before.left[0], at)}"
    )
    since = min(each[2] for each in breaks)
    where = f"turn {turn}, position {at}"
    return Evidence("found", len(breaks) / pairs, since, where, (text, first))


class _Turn(NamedTuple):
    """A row that holds one turn of a trajectory; arrays of token ids."""

    group: str
    run: str
    turn: int
    given: Int64
    """What the turn begins with: its prompt, or all tokens of the row."""
    left: tuple[Int64, ...]
    """What it leaves to the next one: prompt and response; twice where padding is not certain."""


def _following(batch: Batch) -> Iterator[tuple[_Turn, _Turn]]:
    """Yield each two turns that follow each other in a trajectory."""
    by_run: dict[tuple[str, str], dict[int, _Turn]] = {}
    again: set[tuple[str, str]] = set()
    for row in _turns(batch):
        key = (row.group, row.run)
        if row.turn in by_run.setdefault(key, {}):
            again.add(key)  # which of them the next turn follows is not known
        by_run[key][row.turn] = row
    for key, turns in by_run.items():
        if key not in again:
            yield from pairwise(turns[number] for number in sorted(turns))


def _turns(batch: Batch) -> Iterator[_Turn]:
    """Yield the rows of a batch that have a group and tokens of one turn alone."""
    ids = batch["turn_ids"].reshape(batch.rows, -1).astype(np.int64)
    last = ids.max(axis=1, initial=-1)
    is_single = ((ids == last[:, None]) | (ids < 0)).all(axis=1) & (last >= 0)
    prompts = prompts_of(batch)
    if prompts is None:
        on = batch["loss_mask"] != 0
        ends = np.where(on.any(axis=1), on.shape[1] - on[:, ::-1].argmax(axis=1), 0)
        begins = np.zeros_like(ends)
    else:
        prompts = _without_left_padding(prompts) if "prompts" not in batch.lengths else prompts
        begins, ends = response_spans(batch)
    for row, (group, run) in enumerate(keys_of(batch)):
        if not (group and is_single[row]):
            continue
        if prompts is None:
            whole = batch["tokens"][row].astype(np.int64)
            yield _Turn(group, run, int(last[row]), whole, (whole[: ends[row]],))
            continue
        prompt = prompts[row].astype(np.int64)
        written = batch["responses"][row, begins[row] : ends[row]].astype(np.int64)
        without = prompt[: len(prompt) - _run_length(prompt[::-1])]
        ways = (prompt,) if "prompts" in batch.lengths else (prompt, without)
        left = tuple(np.concatenate([way, written]) for way in ways)
        yield _Turn(group, run, int(last[row]), prompt, left)


def _without_left_padding(prompts: Sequence[Array]) -> list[Array]:
    """Strip the padding on the left of equally long rows: the id that the longest run of equal ids
    at a row's begin is made of. Where it is no padding, all rows lose the same begin."""
    runs = [_run_length(prompt) for prompt in prompts]
    longest = int(np.argmax(runs)) if runs else 0
    if not runs or runs[longest] < 2:
        return list(prompts)
    fill = prompts[longest][0]
    return [
        prompt[run:] if run and prompt[0] == fill else prompt
        for prompt, run in zip(prompts, runs, strict=True)
    ]


def _run_length(ids: Array) -> int:
    """Return how many ids at the begin are equal."""
    others = np.flatnonzero(ids != ids[0]) if len(ids) else ids
    return int(others[0]) if len(others) else len(ids)


def _first_difference(before: _Turn, after: _Turn) -> int | None:
    """Return the position at which a turn does not go on from the one before; None: it does."""
    found = []
    for left in before.left:
        shared = min(len(left), len(after.given))
        differ = np.flatnonzero(left[:shared] != after.given[:shared])
        if not len(differ) and len(left) <= len(after.given):
            return None
        found.append(int(differ[0]) if len(differ) else shared)
    return max(found)


def _id_at(ids: Int64, position: int) -> str:
    return str(ids[position]) if position < len(ids) else "no token"
