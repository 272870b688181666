from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.batches import batch_of, bfloat16, from_bfloat16
from tests.support.sampler import (
    CONTEXTS,
    NOISE,
    SHARPNESS,
    VOCABULARY,
    Batch,
    as_is,
    draw,
    log_softmax,
    temperature,
    top_k,
    top_p,
)

from stagescope_service.statistics import (
    Comparability,
    PartRecord,
    StepSummary,
    Summary,
    assemble,
    calibration,
    examine,
    examine_cell,
    publish,
    summarise,
)
from stagescope_service.statistics.codec import summary_from_bytes, summary_to_bytes
from stagescope_service.statistics.comparability import causes_of_ranks, examine_ranks
from stagescope_service.statistics.exact import first_difference, unequal_tokens
from stagescope_service.statistics.noise_checks import scaled
from stagescope_service.statistics.sample_checks import check_samples
from stagescope_service.views.steps.numbers import cell_row
from stagescope_wire.policy_versions import encode_versions

RNG = np.random.default_rng(0)
Q = -RNG.exponential(1.0, (4, 500)) - 1e-3
P = np.minimum(Q + RNG.normal(0, 5e-3, Q.shape), -1e-6)
ON = np.ones((4, 500), np.int64)

Shape = tuple[int, int, int]
"""Ranks, rows of all of them, tokens a row."""
SHAPES: tuple[Shape, ...] = ((8, 64, 60), (2, 32, 100), (1, 16, 200), (1, 8, 300))
SMALL: tuple[Shape, ...] = ((1, 4, 60), (2, 8, 100), (8, 128, 20), (1, 16, 8))


def assembled(
    batch: Batch,
    ranks: int,
    pieces: int = 1,
    mask: npt.NDArray[np.int64] | None = None,
    policy_version: int | None = None,
    **rows_of: Any,
) -> StepSummary:
    """Take a batch in as ranks hand it over, each in several microbatches, and merge it."""
    rows = len(batch.p) // ranks
    mask = np.ones(batch.p.shape, np.int64) if mask is None else mask
    parts = []
    for rank in range(ranks):
        own = np.array_split(np.arange(rank * rows, (rank + 1) * rows), pieces)
        summaries = [
            summarise(
                batch_of(
                    batch.p[at], batch.q[at], mask[at], samples=[f"s{i}" for i in at],
                    policy_version=policy_version, **{n: v[at] for n, v in rows_of.items()},
                )
            )
            for at in own
        ]  # fmt: skip
        merged = Summary.merge([summary_from_bytes(summary_to_bytes(s)) for s in summaries])
        parts.append(
            PartRecord(f"{rank}:1", merged, "actor_compute_log_prob", "actor", rank, data_rank=rank)
        )
    return assemble(parts)


def asked(batch: Batch, ranks: int, pieces: int = 1) -> Comparability:
    whole = assembled(batch, ranks, pieces)
    return examine(whole.summary, whole.ranks)


def moved(batch: Batch, by: int, rows: slice) -> Batch:
    q = batch.q.copy()
    q[rows] = np.roll(q[rows], by, axis=1)
    return dataclasses.replace(batch, q=q)


def padded(batch: Batch) -> Batch:
    p, q = batch.p.copy(), batch.q.copy()
    width = p.shape[1]
    ends = np.linspace(width // 2, width, len(p)).astype(int)
    off = np.arange(width) >= ends[:, None]
    p[off] = q[off] = 0.0
    return dataclasses.replace(batch, p=p, q=q)


def lacking(batch: Batch) -> Batch:
    q = batch.q.copy()
    q[:, ::20] = 0.0
    return dataclasses.replace(batch, q=q)


def rounded(batch: Batch) -> Batch:
    return dataclasses.replace(batch, q=from_bfloat16(bfloat16(batch.p)).astype(np.float32))


SAMPLING: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"temperature {by}": ("temperature", {"sampled": temperature(by)})
        for by in (0.6, 0.9, 0.95, 1.05)
    },
    "raw beside processed": (
        "temperature",
        {"sampled": temperature(0.9), "reported": as_is, "trained": temperature(0.9)},
    ),
    "top-k 4": ("renormalised", {"sampled": top_k(4)}),
    "top-k 20": ("renormalised", {"sampled": top_k(20)}),
    "top-p 0.8": ("renormalised", {"sampled": top_p(0.8)}),
    "top-p 0.95": ("renormalised", {"sampled": top_p(0.95)}),
}
DAMAGE: dict[str, tuple[str, Callable[[Batch, int], Batch]]] = {
    "rows reversed": ("unrelated", lambda b, _: dataclasses.replace(b, p=b.p[::-1])),
    "shift by one": ("shifted", lambda b, _: moved(b, 1, slice(None))),
    "shift by minus one": ("shifted", lambda b, _: moved(b, -1, slice(None))),
    "shift by two": ("shifted", lambda b, _: moved(b, 2, slice(None))),
    "every other sample shifted": ("shifted", lambda b, _: moved(b, 1, slice(None, None, 2))),
    **{
        f"{count} samples shifted": (
            "shifted", lambda b, _, count=count: moved(b, 1, slice(0, count))  # type: ignore[misc]
        )
        for count in (1, 2, 4)
    },
    "one rank shifted": ("shifted", lambda b, ranks: moved(b, -1, slice(0, len(b.q) // ranks))),
    "entropy as q": ("probabilities", lambda b, _: dataclasses.replace(b, q=b.entropy)),
    "negative entropy as q": ("unrelated", lambda b, _: dataclasses.replace(b, q=-b.entropy)),
    "probabilities": ("probabilities", lambda b, _: dataclasses.replace(b, q=np.exp(b.q))),
    "mask over padding": ("padding", lambda b, _: padded(b)),
    "values that q lacks": ("coverage", lambda b, _: lacking(b)),
    "rounded copy": ("rounded", lambda b, _: rounded(b)),
    "never filled in": (
        "constant", lambda b, _: dataclasses.replace(b, q=np.full_like(b.q, -1.0))
    ),
}  # fmt: skip


def sick_batch(name: str, shape: Shape, model: str, engine: str) -> tuple[str, Batch]:
    ranks, rows, tokens = shape
    drawn = functools.partial(
        draw, np.random.default_rng(7), rows, tokens, model=model, engine=engine
    )
    if name in SAMPLING:
        cause, how = SAMPLING[name]
        return cause, drawn(**how)
    cause, damage = DAMAGE[name]
    return cause, damage(drawn(), ranks)


IN_PADDING: dict[str, tuple[str, str, Callable[[Batch, int], Batch]]] = {
    name: (*DAMAGE[name][:1], who, DAMAGE[name][1])
    for name, who in {
        "shift by one": "", "shift by minus one": "", "shift by two": "",
        "2 samples shifted": "2 of", "one rank shifted": "(actor 0)", "rows reversed": "",
        "values that q lacks": "",
    }.items()
} | {
    "one rank's rows reversed": (
        "unrelated", "in 1 of 4 ranks (actor 1)", lambda b, ranks: exchanged(b, ranks)
    ),
}  # fmt: skip


def with_rows(batch: Batch, one: int, other: int) -> Batch:
    q = batch.q.copy()
    q[[one, other]] = q[[other, one]]
    return dataclasses.replace(batch, q=q)


def exchanged(batch: Batch, ranks: int) -> Batch:
    rows = len(batch.q) // ranks
    q = batch.q.copy()
    q[rows : 2 * rows] = q[rows : 2 * rows][::-1]
    return dataclasses.replace(batch, q=q)


@pytest.mark.parametrize("model", ["usual", "sure"])
@pytest.mark.parametrize("name", [*IN_PADDING])
def test_the_zeros_of_the_padding_hide_no_cause(name: str, model: str) -> None:
    """Rows of unequal length are padded with zeros, which damage moves into the mask."""
    cause, who, damage = IN_PADDING[name]
    batch = draw(np.random.default_rng(5), 32, 120, model=model)
    lengths = np.random.default_rng(6).integers(60, 121, 32)
    mask = (np.arange(120) < lengths[:, None]).astype(np.int64)
    p, q = (np.where(mask == 1, stream, 0.0) for stream in (batch.p, batch.q))
    whole = assembled(damage(dataclasses.replace(batch, p=p, q=q), 4), 4, mask=mask)
    judged = examine(whole.summary, whole.ranks)
    assert judged.cause == cause, judged.suspects
    assert who in judged.suspects[0].text


def coarse(batch: Batch) -> Batch:
    """As an engine gives it whose format has no number between 0 and -0.004."""
    return dataclasses.replace(batch, q=np.where(batch.q > -4e-3, 0.0, batch.q))


@pytest.mark.parametrize("share", [0.05, 0.3])
@pytest.mark.parametrize("model", ["usual", "sure"])
@pytest.mark.parametrize("zeros", ["coarse", "top-p 0.8", "top-p 0.95"])
def test_exact_zeros_hide_no_missing_values(zeros: str, model: str, share: float) -> None:
    """A sure token's log-prob is exactly 0 in a coarse format, and where no other token is left."""
    sampling = SAMPLING[zeros][1] if zeros in SAMPLING else {}
    batch = draw(np.random.default_rng(7), 32, 100, model=model, **sampling)
    batch = coarse(batch) if zeros == "coarse" else batch
    healthy = asked(batch, 4)
    assert "coverage" not in {check.name for check in healthy.suspects}
    missing = np.random.default_rng(1).random(batch.q.shape) < share
    filled = asked(dataclasses.replace(batch, q=np.where(missing, 0.0, batch.q)), 4)
    assert filled.verdict == "suspect"
    assert filled.cause == "coverage", filled.suspects
    assert filled.suspects[0].text.startswith("rollout ")


@pytest.mark.parametrize("model", ["usual", "sure", "certain"])
@pytest.mark.parametrize(
    "name", ["rows reversed", "shift by one", "shift by minus one", "shift by two"]
)
def test_exact_zeros_of_a_coarse_stream_hide_no_cause(name: str, model: str) -> None:
    cause, damage = DAMAGE[name]
    batch = damage(coarse(draw(np.random.default_rng(7), 32, 100, model=model)), 4)
    assert asked(batch, 4).cause == cause


def harmless(name: str, model: str) -> bool:
    """Whether nothing is to be seen.

    Nearly no mass lies beyond the cut; or tokens of a vague model are so alike that a temperature
    near 1, another token's log-prob or an entropy is hidden by the noise of int8.
    """
    cut = {"top-k 20": ("certain", "sure"), "top-p 0.95": ("certain",), "top-k 4": ("certain",)}
    return model in cut.get(name, ()) or (model == "vague" and name in HIDDEN_BY_NOISE)


HIDDEN_BY_NOISE = (
    "temperature 0.95", "temperature 1.05", "raw beside processed", "every other sample shifted",
    "1 samples shifted", "2 samples shifted", "4 samples shifted", "negative entropy as q",
)  # fmt: skip


@pytest.mark.parametrize("name", [*SAMPLING, *DAMAGE])
def test_a_sick_batch_is_suspect_by_its_own_cause(name: str) -> None:
    found: Counter[str] = Counter()
    cases = list(itertools.product(SHARPNESS, NOISE))
    for number, (model, engine) in enumerate(cases):
        if harmless(name, model):
            continue
        shape = SHAPES[number % len(SHAPES)]
        cause, batch = sick_batch(name, shape, model, engine)
        verdict = asked(batch, shape[0])
        found["suspect" if verdict.verdict == "suspect" else "missed"] += 1
        found["right" if verdict.cause == cause else f"{model} {engine} {verdict.cause}"] += 1
    assert found["suspect"] + found["missed"] >= 6
    assert found["missed"] == 0, found
    assert found["right"] >= 0.95 * found["suspect"], found


def test_a_bias_of_the_first_tokens_alone_is_no_cut_of_the_vocabulary() -> None:
    causes: Counter[str | None] = Counter()
    for shape, model, engine in itertools.product(SHAPES, SHARPNESS, NOISE):
        ranks, rows, tokens = shape
        batch = draw(np.random.default_rng(7), rows, tokens, model=model, engine=engine)
        p = batch.p.copy()
        p[:, 0] -= 2.0  # as after a prompt that the trainer tokenises otherwise
        causes[asked(dataclasses.replace(batch, p=p), ranks).cause] += 1
    assert not {"renormalised", "calibration"} & set(causes), causes
    assert causes["first_token"] >= 8, causes


@pytest.mark.parametrize("edge", ["first", "last"])
@pytest.mark.parametrize("stream", ["p", "q"])
@pytest.mark.parametrize("tokens", [20, 60, 300])
def test_edge_tokens_that_were_filled_in_are_no_shift(edge: str, stream: str, tokens: int) -> None:
    batch = draw(np.random.default_rng(5), 32, tokens, model="unsure", engine="bf16")
    filled = getattr(batch, stream).copy()
    filled[:, {"first": 0, "last": -1}[edge]] = -100.0
    verdict = asked(dataclasses.replace(batch, **{stream: filled}), 2)
    assert [check.name for check in verdict.suspects] == [f"{edge}_token"], verdict.suspects
    # Samples that are shifted indeed are named beside them.
    filled[3:5, 1:-1] = np.roll(filled[3:5, 1:-1], 1, axis=1)
    shifted = asked(dataclasses.replace(batch, **{stream: filled}), 2)
    assert [check.text for check in shifted.suspects if "s3, s4" in check.text] or tokens == 20


def test_a_rank_is_not_suspect_for_the_edge_tokens_of_another() -> None:
    batch = draw(np.random.default_rng(5), 32, 60, model="unsure", engine="bf16")
    q = batch.q.copy()
    q[16:, 0] = -100.0
    step = assembled(dataclasses.replace(batch, q=q), 2)
    assert examine(step.summary, step.ranks).cause == "first_token"
    verdicts = [
        examine_cell(row.cell, step.summary, row.produced or step.summary.produced).verdict
        for row in step.ranks
    ]
    assert verdicts[0] == "comparable"


@pytest.mark.parametrize("value", [-1e200, -1e300])
def test_huge_values_are_judged_without_an_error(value: float) -> None:
    batch = draw(np.random.default_rng(5), 32, 60, model="unsure", engine="bf16")
    q = batch.q.astype(np.float64)
    q[:, 3] = value
    given = dataclasses.replace(batch, p=batch.p.astype(np.float64), q=q)
    assert "first_token" not in {check.name for check in asked(given, 2).suspects}


ROWS: tuple[Shape, ...] = (
    (1, 2, 300), (1, 3, 60), (1, 4, 60), (1, 4, 300), (1, 8, 300), (2, 8, 100), (4, 16, 100),
    (8, 64, 60), (1, 16, 200), (2, 32, 24),
)  # fmt: skip
"""From two rows, of which an exchange spoils every number, to many on several ranks."""


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("model", ["sure", "usual", "unsure"])
def test_the_samples_of_exchanged_rows_are_named(shape: Shape, model: str) -> None:
    ranks, rows, tokens = shape
    batch = draw(np.random.default_rng(7), rows, tokens, model=model)
    assert asked(batch, ranks).verdict == "comparable"
    for one, other in ((0, 1), (0, rows - 1)):
        judged = asked(with_rows(batch, one, other), ranks)
        if model == "sure" and tokens < 32:  # too few tokens of a sample are not certain
            continue
        assert (judged.verdict, judged.cause) == ("suspect", "unrelated")
        names = f"in 2 of {rows} samples (s{one}, s{other})"
        assert rows == 2 or judged.suspects[0].text.startswith(names), judged.suspects


@pytest.mark.parametrize("tokens", [6, 3])
def test_a_few_tokens_far_off_in_one_sample_make_no_other_row(tokens: int) -> None:
    batch = draw(np.random.default_rng(7), 16, 60)
    p = batch.p.copy()
    p[3, 5 : 5 + 4 * tokens : 4] = -20.3 - 1.7 * np.arange(tokens)
    assert asked(dataclasses.replace(batch, p=p), 2).verdict == "comparable"


@pytest.mark.parametrize("engine", [*NOISE])
@pytest.mark.parametrize(("k", "model"), [(4, "unsure"), (20, "unsure"), (20, "vague")])
def test_rows_exchanged_beside_a_deep_cut(k: int, model: str, engine: str) -> None:
    """At any lag |p - q| is the mass that was cut: the correlation alone tells the samples."""
    batch = draw(np.random.default_rng(7), 16, 200, model=model, engine=engine, sampled=top_k(k))
    assert asked(batch, 2).cause == "renormalised"
    judged = asked(with_rows(batch, 2, 9), 2)
    assert judged.cause == "unrelated"
    assert "in 2 of 16 samples (s2, s9)" in judged.suspects[0].text, judged.suspects


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_a_deep_cut_of_a_flat_vocabulary_makes_no_sample_unrelated(spread: float) -> None:
    """4 of 64 tokens are left: q of each token lies far above p, and hardly depends on it."""
    rng = np.random.default_rng(1)
    scores = log_softmax(spread * rng.standard_normal((16 * 100, 64)))
    sampled = top_k(4)(scores)
    token = (sampled + rng.gumbel(size=sampled.shape)).argmax(axis=-1)[:, None]
    p, q = (
        np.take_along_axis(stream, token, axis=-1).astype(np.float32).reshape(16, 100)
        for stream in (scores, sampled)
    )
    drawn = Batch(p, q, np.zeros_like(p))
    assert asked(drawn, 2).cause == "renormalised"
    mixed = dataclasses.replace(drawn, p=np.concatenate([p[1::-1], p[2:]]))
    assert "unrelated" in {check.name for check in asked(mixed, 2).suspects}


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("value", [-20.0, -50.0, -100.0])
@pytest.mark.parametrize("model", ["usual", "sure"])
def test_a_few_tokens_far_off_make_no_other_rows(tokens: int, value: float, model: str) -> None:
    drawn = draw(np.random.default_rng(2), 32, 46, model=model)
    p = drawn.p.copy()
    p.reshape(-1)[7 : 7 + 400 * tokens : 400] = value
    # One value in each is a fill value, and the cause of nothing else.
    suspects = asked(dataclasses.replace(drawn, p=p), 4).suspects
    assert {check.name for check in suspects} <= {"coverage"}
    p.reshape(-1)[7 : 7 + 400 * tokens : 400] = -20.3 - 3.7 * np.arange(tokens)
    assert asked(dataclasses.replace(drawn, p=p), 4).verdict == "comparable"


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_check_that_was_not_made_is_not_counted_as_fine(rows: int) -> None:
    """Of 40, 80 and 120 tokens a temperature, a cut and other rows are not looked for."""
    found = asked(draw(np.random.default_rng(7), rows, 40), 1)
    if rows == 4:
        assert (found.verdict, found.undecided) == ("comparable", ())
        return
    assert (found.verdict, found.suspects) == ("unknown", ())
    text = f"not checked: it needs 128 tokens, and {40 * rows} counted"
    assert {check.name: check.text for check in found.undecided} == dict.fromkeys(
        ("calibration", "temperature", "unrelated"), text
    )
    # What such a check finds in more tokens was there all the time.
    assert asked(draw(np.random.default_rng(7), rows, 40, sampled=top_k(4)), 1).verdict == "unknown"


def test_of_200_healthy_batches_none_is_suspect() -> None:
    rng = np.random.default_rng(3)
    shapes, kinds = SHAPES + SMALL, list(itertools.product(SHARPNESS, NOISE))
    wrong = []
    for number in range(200):
        (ranks, rows, tokens), (model, engine) = shapes[number % 8], kinds[number % 15]
        batch = draw(rng, rows, tokens, model=model, engine=engine)
        found = asked(batch, ranks)
        if found.verdict != "comparable":
            wrong.append((model, engine, ranks, rows, tokens, found.suspects))
    assert not wrong


@pytest.mark.parametrize("name", ["top-k 20", "one rank shifted", "2 samples shifted"])
def test_the_split_into_microbatches_changes_no_verdict(name: str) -> None:
    _, batch = sick_batch(name, (2, 32, 100), "usual", "int8")
    one, several = (asked(batch, 2, pieces) for pieces in (1, 5))
    assert [check.name for check in one.suspects] == [check.name for check in several.suspects]
    for first, second in zip(one.checks, several.checks, strict=True):
        assert first.values == pytest.approx(dict(second.values), rel=1e-9, nan_ok=True)


def test_a_healthy_bfloat16_stream_is_compared_and_its_rounding_is_said() -> None:
    batch = draw(np.random.default_rng(1), 16, 200)
    q = from_bfloat16(bfloat16(batch.q)).astype(np.float32)
    noisy = summarise(batch_of(batch.p, q, np.ones(q.shape, np.int64)))
    assert examine(noisy).verdict == "comparable"
    floor = publish(noisy)["rounding/abs_diff_floor"]
    error = float(np.abs(q.astype(float) - batch.q).mean())
    assert floor == pytest.approx(error, rel=0.1)
    as_bits = summarise(batch_of(batch.p, bfloat16(batch.q), np.ones(q.shape, np.int64)))
    assert publish(as_bits)["rounding/abs_diff_floor"] == floor
    plain = summarise(batch_of(batch.p, batch.q, np.ones(q.shape, np.int64)))
    assert publish(plain)["rounding/abs_diff_floor"] < 1e-6


@pytest.mark.parametrize("noise", [1e-3, 1e-6, 3e-8, 1e-9, 1e-12, 1e-14])
def test_the_calibration_of_streams_that_hardly_differ(noise: float) -> None:
    rng = np.random.default_rng(7)
    q = -np.abs(rng.normal(1.0, 0.1, (1, 500)))
    p = q + rng.normal(0.1, 1.0, q.shape) * noise
    found = calibration(summarise(batch_of(p, q, np.ones(q.shape, np.int64))).total)
    d = p.astype(np.longdouble) - q.astype(np.longdouble)
    ratios = np.expm1(d)
    expected = ratios.mean() / (ratios.std(ddof=1) / np.sqrt(np.longdouble(q.size)))
    assert found.z == pytest.approx(float(expected), rel=1e-7)


def test_a_constant_ratio_is_said_without_an_infinite_number() -> None:
    q = np.log(np.random.default_rng(3).uniform(0.1, 0.9, (20, 500)))
    found = examine(summarise(batch_of(q + np.float64(0.25), q, np.ones(q.shape, np.int64))))
    assert found.verdict == "suspect"
    texts = [check.text for check in found.checks if check.name in ("calibration", "renormalised")]
    assert any("1.2840, the same in every token, and not 1" in text for text in texts), texts
    assert not any("inf " in check.text for check in found.checks)


def test_the_calibration_is_of_the_fresh_tokens_where_versions_are_known() -> None:
    versions = np.repeat([[3], [4], [4], [5]], 500, axis=1)
    summary = summarise(batch_of(P, Q, ON, versions=versions, policy_version=5))
    ratios = np.exp(P[3] - Q[3])
    published = publish(summary)
    assert published["calibration/tokens"] == 500
    assert published["calibration/ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-12)
    stale = summarise(batch_of(P, Q, ON, versions=versions, policy_version=9))
    assert publish(stale)["calibration/tokens"] == 0
    assert np.isnan(publish(stale)["calibration/z"])


def found(
    p: npt.NDArray[np.float64], q: npt.NDArray[np.float64], **others: Any
) -> tuple[str, set[str]]:
    result = examine(summarise(batch_of(p, q, ON, **others)))
    return result.verdict, {check.name for check in result.suspects}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            np.nan,
            "rollout is not finite in 100 tokens where the other stream has a value: the",
        ),
        (
            -np.inf,
            "rollout is not finite in 100 tokens where the other stream has a value: the",
        ),
        (0.0, "rollout is exactly 0 in 100 tokens where the other stream has a value: the mask"),
    ],
)
def test_a_mask_over_tokens_that_one_stream_lacks(value: float, text: str) -> None:
    q = Q.copy()
    q[:, ::20] = value
    result = examine(summarise(batch_of(P, q, ON)))
    (check,) = (check for check in result.suspects if check.name == "coverage")
    assert check.text.startswith(text)
    assert {"constant", "coverage"} <= found(P, np.zeros_like(Q))[1]


@pytest.mark.parametrize(("p", "suspects"), [(-1e-3, set()), (-0.5, {"coverage"})])
def test_a_probability_that_rounds_to_one_in_a_short_round_is_no_missing_value(
    p: float, suspects: set[str]
) -> None:
    mask, old, rollout = ON.copy(), P.copy(), Q.copy()
    mask[:, [248, 250]] = 0  # a round of one token a row
    old[:, 249], rollout[:, 249] = p, 0.0
    result = examine(summarise(batch_of(old, rollout, mask)))
    assert {check.name for check in result.suspects} == suspects


def test_an_endless_repetition_is_no_padding() -> None:
    batch = draw(np.random.default_rng(2), 16, 200)
    for row in range(2):
        batch.p[row, 20:] = batch.q[row, 20:] = 0.0
        assert asked(batch, 1).verdict == "comparable"


@pytest.mark.parametrize(("first", "last"), [(2, 1), (8, 4), (12, 0), (0, 4), (3, 12)])
@pytest.mark.parametrize("longest", [40, 200])
def test_the_sure_tokens_of_a_template_are_no_padding(first: int, last: int, longest: int) -> None:
    rng = np.random.default_rng(first + last)
    batch = draw(rng, 16, longest)
    mask = np.zeros(batch.p.shape, np.int64)
    for row, length in enumerate(rng.integers(longest // 2, longest + 1, 16)):
        mask[row, :length] = 1
        for stream in (batch.p, batch.q):
            stream[row, :first] = stream[row, length - last : length] = 0.0
    assert examine(summarise(batch_of(batch.p, batch.q, mask))).verdict == "comparable"


@pytest.mark.parametrize("longest", [24, 40, 200])
def test_padding_behind_responses_of_several_lengths_is_found(longest: int) -> None:
    rng = np.random.default_rng(longest)
    batch = draw(rng, 16, longest)
    for row, length in enumerate(rng.integers(longest // 2, longest + 1, 16)):
        batch.p[row, length:] = batch.q[row, length:] = 0.0
    assert asked(batch, 1).cause == "padding"


@pytest.mark.parametrize("seed", range(8))
def test_a_sure_model_that_answers_a_group_alike_is_comparable(seed: int) -> None:
    """Two groups of 64 copies each, but for four answers: d of a copy is no evidence of its own."""
    rng = np.random.default_rng(seed)
    q = np.minimum(-0.02 * rng.exponential(1.0, (6, 24)), 0.0)
    q[rng.random(q.shape) < 0.06] -= 1.5
    d = 0.04 * q * rng.choice([0.5, 1.5], q.shape)  # as it falls out for a few rare tokens
    rows = np.concatenate([np.repeat([0, 1], 62), np.arange(2, 6)])
    mask = np.ones((128, 24), np.int64)
    batch = batch_of((q + d)[rows].astype(np.float32), q[rows].astype(np.float32), mask)
    assert examine(summarise(batch)).verdict == "comparable"
    # The same slope in as many different answers is a temperature.
    q = np.minimum(-0.02 * rng.exponential(1.0, (128, 24)), 0.0)
    q[rng.random(q.shape) < 0.06] -= 1.5
    batch = batch_of((1.04 * q).astype(np.float32), q.astype(np.float32), mask)
    assert examine(summarise(batch)).cause == "temperature"


def test_a_prompt_of_one_length_is_found() -> None:
    batch = draw(np.random.default_rng(3), 16, 200)
    batch.p[:, :24] = batch.q[:, :24] = 0.0
    assert asked(batch, 1).cause == "padding"


def test_a_round_alone_is_found() -> None:
    mask = ON.copy()
    mask[:, 250] = 0
    q = Q.copy()
    q[:, 251:] = np.roll(Q[:, 251:], 1, axis=1)
    result = examine(summarise(batch_of(P, q, mask)))
    assert (result.verdict, result.cause) == ("suspect", "shifted")
    assert "in 1 of 2 rounds (1)" in result.suspects[0].text


def test_who_is_shifted_is_named() -> None:
    batch = moved(draw(np.random.default_rng(1), 128, 60), 1, slice(3, 4))
    assert "in 1 of 128 samples (s3)" in asked(batch, 8).suspects[0].text
    whole = assembled(moved(draw(np.random.default_rng(1), 128, 60), 1, slice(0, 16)), 8)
    assert "in 1 of 8 ranks (actor 0)" in examine(whole.summary, whole.ranks).suspects[0].text
    verdicts = [examine_cell(row.cell, whole.summary, row.produced).verdict for row in whole.ranks]
    assert verdicts == ["suspect", *["comparable"] * 7]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_rank_is_judged_by_its_samples(count: int) -> None:
    """A rank of 16 samples: those of its tokens that are in place hide a few that are not."""
    batch = draw(np.random.default_rng(1), 64, 60)
    for rank in (0, 2):
        batch = moved(batch, 1, slice(16 * rank, 16 * rank + count))
    step = assembled(batch, 4)
    for each in (step, StepSummary.from_bytes(step.to_bytes())):
        found = examine_ranks(each.summary, each.ranks)
        assert [judged.verdict for judged in found] == ["suspect", "comparable"] * 2
        assert [judged.cause for judged in found] == ["shifted", None] * 2
        names = ", ".join(f"s{32 + at}" for at in range(min(count, 5)))
        assert f"in {count} of 16 samples ({names}" in found[2].suspects[0].text
        assert causes_of_ranks(each.summary, each.ranks, "shifted") == ()


def test_rounds_of_shifted_samples_are_not_called_unrelated() -> None:
    step = assembled(moved(draw(np.random.default_rng(0), 64, 60), 1, slice(0, 32)), 4)
    judged = examine(step.summary, step.ranks)
    ((_, cell),) = step.summary.rounds.items()
    assert (judged.cause, examine_cell(cell, step.summary, {}).cause) == (
        "shifted", "unrelated",
    )  # fmt: skip
    row = cell_row(cell, step.summary, judged)
    assert (row["comparable"], row["cause"]) == ("suspect", "shifted")


def test_a_cause_that_is_already_said_leaves_those_of_other_ranks() -> None:
    batch = moved(draw(np.random.default_rng(1), 128, 60), 1, slice(0, 16))
    of_rank_3 = slice(48, 64)
    batch.q[of_rank_3] = lacking(batch).q[of_rank_3]
    whole = assembled(batch, 8)

    def places(besides: str | None) -> dict[str, object]:
        causes = causes_of_ranks(whole.summary, whole.ranks, besides)
        return {cause.check.name: cause.places for cause in causes}

    shifted, coverage = {"shifted": (("actor", 0),)}, {"coverage": (("actor", 3),)}
    assert places(None) == {**shifted, **coverage}
    assert places("shifted") == coverage
    assert places("coverage") == shifted


def test_the_verdict_of_streams_that_hardly_differ() -> None:
    assert found(P, Q) == ("comparable", set())
    q = Q.copy()
    q[0, 0] += 1e-9
    assert found(Q, q) == ("comparable", set())
    assert found(Q - 0.05, Q)[1] == {"renormalised"}
    assert found(Q, Q) == ("not measured", {"bitwise_equal"})
    versions = np.repeat([[3], [4], [4], [5]], 500, axis=1)
    assert found(P, Q, versions=versions, policy_version=5) == ("suspect", {"versions"})


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["step-9", "step-10"], "by the number in them the oldest step-9, the newest step-10"),
        (["9", "10"], "the oldest 9, the newest 10"),
        (
            ["new", "default"],
            "in the order in which they appear new to default: how old a token is",
        ),
        (["default"], "one policy version, default"),
    ],
)
def test_the_check_names_texts_of_versions_and_what_orders_them(
    texts: list[str], said: str
) -> None:
    codes, names = encode_versions(texts[row % len(texts)] for row in range(len(P)))
    named = {int(code): text for code, text in names.items()}
    batch = dataclasses.replace(batch_of(P, Q, ON, versions=np.array(codes)), version_names=named)
    (check,) = [check for check in examine(summarise(batch)).checks if check.name == "versions"]
    assert said in check.text
    assert check.values["versions"] == len(texts)


PRODUCERS = {
    "copied": ("trainer", "trainer"), "two": ("trainer", "engine"), "unknown": ("trainer", None),
}  # fmt: skip


def told(*of_ranks: str, differing: bool = False) -> StepSummary:
    """Equal streams of 2000 tokens a rank, of the producers that it named."""
    parts = []
    for rank, name in enumerate(of_ranks):
        batch = batch_of(
            Q if not differing or rank else P, Q, ON, samples=[f"{rank}-{i}" for i in range(4)]
        )
        summary = summarise(dataclasses.replace(batch, producers=PRODUCERS[name]))
        parts.append(PartRecord(f"{rank}:1", summary, "s", "actor", rank, data_rank=rank))
    return StepSummary.from_bytes(assemble(parts).to_bytes())


@pytest.mark.parametrize(
    ("of_ranks", "verdict", "texts"),
    [
        (("copied", "copied"), "not measured", ["both come from trainer: one is a copy"]),
        (("two", "two"), "exact", [
            "two producers computed them (old: trainer; rollout: engine): exact, proved on 4000"
        ]),
        (("copied", "two", "two", "two"), "not measured", [
            "both come from trainer in 25.0% of them (2000 tokens: actor 0)",
            "two producers computed them in 75.0% of them (6000 tokens: actor 1, actor 2, actor 3) "
            "(old: trainer; rollout: engine): exact, proved on 6000 tokens",
        ]),
        (("two", "unknown"), "not measured", [
            "who computed them is not reported in 50.0% of them (2000 tokens: actor 1)",
            "proved on 2000 tokens",
        ]),
    ],
)  # fmt: skip
def test_equal_tokens_are_copies_where_their_own_rank_said_so(
    of_ranks: tuple[str, ...], verdict: str, texts: list[str]
) -> None:
    whole = told(*of_ranks)
    judged = examine(whole.summary, whole.ranks)
    assert judged.verdict == verdict
    said = next(check for check in judged.checks if check.name == "bitwise_equal")
    for text in texts:
        assert text in said.text
    own = {"copied": "not measured", "two": "exact", "unknown": "not measured"}
    for row, name in zip(whole.ranks, of_ranks, strict=True):
        assert examine_cell(row.cell, whole.summary, row.produced).verdict == own[name]


@pytest.mark.parametrize(("zero", "other"), [(0.0, -0.0), (-0.0, 0.0)])
def test_equal_are_numbers_whatever_the_sign_of_a_zero_and_the_dtype(
    zero: float, other: float
) -> None:
    held = from_bfloat16(bfloat16(Q)).astype(np.float32)
    p, q = held.copy(), bfloat16(held)
    p[:, ::7] = zero
    q[:, ::7] = bfloat16(np.array(other))
    batch = dataclasses.replace(batch_of(p, q, ON), producers=PRODUCERS["two"])
    assert (batch.p_dtype, batch.q_dtype) == ("float32", "bfloat16")
    summary = summarise(batch)
    assert examine(summary).verdict == "exact"
    assert unequal_tokens(summary.total) == 0
    assert first_difference(summary) is None
    p[2, 8] = np.nextafter(p[2, 8], np.float32(0))
    summary = summarise(dataclasses.replace(batch_of(p, q, ON), producers=PRODUCERS["two"]))
    found = first_difference(summary)
    assert found is not None
    assert (found.row, found.position) == (2, 8)
    assert examine(summary).verdict != "exact"


def test_a_rank_of_two_producers_is_no_copy_because_another_one_is() -> None:
    whole = told("copied", "two", "two", differing=True)  # the rank that would copy differs
    judged = examine(whole.summary, whole.ranks)
    assert (judged.verdict, judged.suspects) == ("comparable", ())
    other = told("copied", "copied", "two", differing=True)
    (found,) = examine(other.summary, other.ranks).suspects
    assert found.text.startswith("in 1 of 3 ranks (actor 1): ")
    assert found.text.endswith("both come from trainer: one is a copy, nothing was measured")


def test_a_round_says_that_the_producers_are_those_of_the_step() -> None:
    whole = told("copied", "two")
    cell = whole.ranks[0].cell
    (found,) = examine_cell(cell, whole.summary, whole.summary.produced).suspects
    assert "in 50.0% of the step's tokens (2000 tokens)" in found.text


def test_too_few_tokens_say_nothing() -> None:
    few = examine(summarise(batch_of(P[:1, :5], Q[:1, :5], ON[:1, :5])))
    assert few.verdict == "unknown"
    none = examine(summarise(batch_of(P[:1, :5], Q[:1, :5], ON[:1, :5] * 0)))
    assert none.verdict == "unknown"
    assert not none.suspects


def test_noise_makes_no_sample_of_many_one_of_other_rows() -> None:
    """Of 32 short samples one is fitted by a neighbouring token as well, by chance."""
    false, missed = 0, 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        lengths = random.integers(16, 81, 32)
        mask = (np.arange(80) < lengths[:, None]).astype(np.int64)
        q = -random.exponential(1.0, mask.shape)
        p = np.minimum(q + random.normal(0.0, 0.6, q.shape), -1e-9)
        ids = [f"sample-{row}" for row in range(32)]
        false += bool(check_samples(summarise(batch_of(p, q, mask, samples=ids))).strange.any())
        p[0] = np.minimum(random.permutation(q[0]), -1e-9)
        mask[0, :40] = 1
        found = check_samples(summarise(batch_of(p, q, mask, samples=ids)))
        missed += not found.strange[found.names.index("sample-0")]
    assert false <= 2  # of 40 steps; 15 without a look at each sample's own correlation
    assert missed <= 2


def test_the_same_contexts_in_a_group_of_a_sure_model_are_no_temperature() -> None:
    """The first round of a group of copies, with a mean |d| of 2e-4 to 8e-4 in its few unsure
    tokens: without a least size 15 of these 300 healthy batches are suspect."""
    wrong = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        unsure = rng.random((16, 25)) < 0.08
        q = np.where(unsure, -0.03 * rng.exponential(1.0, unsure.shape), -1e-6).repeat(4, axis=0)
        p = q * (1.0 + 0.3 * rng.normal(0.0, 1.0, unsure.shape)).repeat(4, axis=0)
        gap = np.zeros((64, 1))
        later = -rng.exponential(1.0, q.shape)
        noisy = later + rng.normal(0.0, 5e-3, q.shape)
        streams = [np.hstack([p, gap, noisy]), np.hstack([q, gap, later])]
        mask = np.ones((64, 51), np.int64)
        mask[:, 25] = 0
        p, q = (np.minimum(stream, 0.0).astype(np.float32) for stream in streams)
        result = examine(summarise(batch_of(p, q, mask)))
        if result.verdict != "comparable":
            wrong.append((seed, result.suspects))
    assert not wrong


def test_noise_of_a_vague_model_s_engine_is_no_temperature() -> None:
    """d falls with q by as much as the engine's noise makes q vary: errors in variables."""
    rng = np.random.default_rng(5)
    wrong = []
    for number in range(300):
        ranks, rows, tokens = (SHAPES + SMALL)[number % 8]
        batch = draw(rng, rows, tokens, model="vague", engine="int8")
        if tokens * rows > 3000:  # drawn for the random numbers alone
            continue
        judged = asked(batch, ranks)
        wrong += [(number, judged.suspects)] if judged.verdict != "comparable" else []
    assert not wrong


def test_of_many_slices_some_are_beyond_four_standard_errors_by_chance() -> None:
    _, batch = sick_batch("temperature 0.9", (1, 8, 300), "usual", "int8")
    cell = assembled(batch, 1).summary.total
    sequences = assembled(batch, 1).summary.sequences
    few = scaled(cell, "old", "rollout", sequences)
    assert few.status == "suspect"
    assert few.values["z"] < -4.0
    assert "standard errors from 1" in few.text
    assert scaled(cell, "old", "rollout", sequences, slices=10**300).status == "ok"


def drifted(batch: Batch, ranks: int, policy_version: int) -> Comparability:
    """Judge a batch of which every token was sampled by version 4."""
    four = np.full(len(batch.p), 4)
    step = assembled(batch, ranks, versions=four, policy_version=policy_version)
    return examine(step.summary, step.ranks)


@pytest.mark.parametrize("model", ["usual", "unsure"])
def test_policy_drift_is_no_other_row(model: str) -> None:
    """A large update: the trainer scores what version 4 sampled with quite other logits."""
    update = 3.0 * np.random.default_rng(0).standard_normal((CONTEXTS, VOCABULARY))
    for ranks, rows, tokens in SHAPES + SMALL:
        batch = draw(
            np.random.default_rng(7), rows, tokens, model=model,
            trained=lambda scores: log_softmax(scores + update),
        )  # fmt: skip
        assert drifted(batch, ranks, 4).cause == "unrelated"
        judged = drifted(batch, ranks, 5)
        assert judged.verdict == "comparable", judged.suspects
        (said,) = (check for check in judged.checks if check.name == "unrelated")
        assert "policy drift explains a low one" in said.text
        mixed = dataclasses.replace(batch, p=batch.p[::-1])
        assert drifted(mixed, ranks, 5).cause == "unrelated"


def test_a_row_of_another_order_is_found_beside_policy_drift() -> None:
    update = 2.0 * np.random.default_rng(0).standard_normal((CONTEXTS, VOCABULARY))
    batch = draw(
        np.random.default_rng(7), 32, 100, trained=lambda scores: log_softmax(scores + update)
    )
    judged = drifted(with_rows(batch, 2, 9), 2, 5)
    assert "in 2 of 32 samples (s2, s9)" in judged.suspects[0].text


def test_fresh_tokens_of_other_rows_are_found_beside_stale_ones() -> None:
    batch = draw(np.random.default_rng(7), 32, 100)
    p = batch.p.copy()
    p[:8] = p[7::-1]
    summary = summarise(
        batch_of(p, batch.q, np.ones(p.shape, np.int64), policy_version=5,
                 versions=np.where(np.arange(32) < 8, 5, 4))
    )  # fmt: skip
    assert "unrelated" in {check.name for check in examine(summary).suspects}
