"""Numbers of ranks and parts: how they pair, and when they differ by more than noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.memory_dumps import MemoryDump, batch, record, split, tensor_of

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report.as_json import as_json
from stagescope_service.compare.results import TensorResult, Verdict
from stagescope_service.dumps.records import DumpContents, Location
from stagescope_wire.comparison_texts import as_lines
from stagescope_wire.schema import Part
from stagescope_wire.tensorfile import Array

LOG_PROB, UPDATE = "actor_compute_log_prob", "actor_update"
SAMPLES = [f"s{number}" for number in range(8)]


def at(section: str, samples: Sequence[str] = (), /, **fields: Any) -> DumpContents:
    """A record of numbers, or of the log-probs of samples, in a file of its own."""
    numbers = fields.pop("numbers", None)
    location = Location(
        0, fields["stage"], fields["role"], fields["rank"], fields.get("part", Part())
    )
    name = "old_log_probs" if section == "old_log_probs" else "log_probs"
    values = [np.random.default_rng([int(s[1:]), len(name)]).random(6, np.float32) for s in samples]
    mask = np.ones((len(samples), 6), np.int64)
    made = record(section, numbers=numbers)
    if samples:
        tensors: dict[str, Array] = {name: np.stack(values), "response_mask": mask}
        made = record(section, tensors, samples=tuple(samples), mask="response_mask")
    path = Path(f"{section}/{location}.safetensors")
    entry = dataclasses.replace(made.entry, location=location, path=path)
    return dataclasses.replace(made, entry=entry)


def run(*, one_file: bool = False, entropy: float = 0.5) -> MemoryDump:
    """A step of two ranks: log-probs of each rank's samples, then an update of two minibatches.

    `one_file`: the log-probs are one file of the driver's, as an export of NexRL's layout has them.
    """
    records = []
    for rank in range(2):
        place: dict[str, Any] = {"stage": LOG_PROB, "role": "actor", "rank": rank}
        if not one_file:
            records.append(at("old_log_probs", SAMPLES[4 * rank : 4 * rank + 4], **place))
        records.append(at("metrics", numbers={"entropy": entropy + rank}, **place))
        # Minibatches take their samples from each other's rank, as a shuffle does.
        for minibatch in range(2):
            place |= {"stage": UPDATE, "part": Part(minibatch=minibatch)}
            records.append(at("forward_data", SAMPLES[2 * minibatch + rank :: 4], **place))
            records.append(at("loss", numbers={"loss": 0.25 * (1 + rank) + minibatch}, **place))
    if one_file:
        records.append(at("old_log_probs", SAMPLES, stage=LOG_PROB, role="driver", rank=0))
    return MemoryDump(records, about={"settings": {"keep": {"what": ["all"] if one_file else []}}})


def locations(found: TensorResult) -> set[tuple[Location, Location]]:
    return {each.comparison.locations for each in found.shards}


@pytest.mark.parametrize("swapped", [False, True])
def test_numbers_pair_by_stage_rank_and_part_if_one_side_has_no_sample_ids(
    swapped: bool,
) -> None:
    sides = [run(), run(one_file=True)]
    result = compare(sides[::-1] if swapped else sides)
    for name, count in (("entropy", 2), ("loss", 4)):
        found = tensor_of(result, name)
        assert (found.verdict, found.found.pairs) == (Verdict.SAME, count), found.reason
        assert all(one == other for one, other in locations(found))
    assert result.pairs[0].first is None


def test_a_number_that_differs_is_still_found() -> None:
    result = compare([run(), run(one_file=True, entropy=0.75)])
    assert result.verdict is Verdict.DIFFERENT
    assert result.first is not None
    assert result.first.name == "entropy"
    assert all(one == other for one, other in locations(tensor_of(result, "entropy")))
    # What the two sides keep is no cause of it.
    assert not any("settings" in cause.title for cause in result.pairs[0].causes)


def test_the_evidence_of_agreement_is_counted() -> None:
    samples = batch(6)
    others = [*samples[:2], *(dataclasses.replace(s, response=s.response + 1) for s in samples[2:])]
    result = compare([split(samples), split(others)])
    excluded = "\n".join(result.pairs[0].excluded)
    assert "rewards agree (2 of 6 samples)" in excluded
    text = " ".join(line.text.strip() for line in as_lines(as_json(result)))
    assert "rewards: same, 2 values of 2 of 6 samples" in text
    result = compare([split(samples), split(samples[:4])])
    assert "rewards agree (4 of 6 samples)" in "\n".join(result.pairs[0].excluded)


def noisy(
    deviation: float,
    coefficient: float,
    *,
    metric: float = 0.0,
    sections: Sequence[str] = ("loss",),
) -> MemoryDump:
    """A step whose log-probs have noise that a measured floor covers, and the loss made of them."""
    random, shape = np.random.default_rng(7), (16, 64)
    exact = -random.standard_exponential(shape)
    advantages, entropy = random.standard_normal(shape), random.random(shape)
    moved = exact + deviation * np.random.default_rng(1).standard_normal(shape)
    policy = float(-(advantages * np.exp(moved - exact)).mean())
    numbers = {"pg_loss": policy, "loss": policy - coefficient * float(entropy.mean())}
    records = [record(section, numbers=numbers) for section in sections]
    records.append(record("metrics", numbers={"kl": policy / 2 + metric}))
    samples = tuple(f"s{row}" for row in range(len(exact)))
    for section, name, values in (
        ("forward_data", "log_probs", moved), ("advantages", "advantages", advantages),
    ):  # fmt: skip
        mask = np.ones(shape, np.int64)
        tensors: dict[str, Array] = {name: values.astype(np.float32), "response_mask": mask}
        records.append(record(section, tensors, samples=samples, mask="response_mask"))
    return MemoryDump(records, about={"noise_floor": {"mean": 5e-3, "max": 3e-2}})


def test_a_loss_of_inputs_within_noise_is_within_noise() -> None:
    result = compare([noisy(0.0, 0.01), noisy(5e-3, 0.01)])
    assert tensor_of(result, "log_probs").verdict is Verdict.WITHIN_NOISE
    loss = tensor_of(result, "loss")
    assert loss.found.max_abs > 1e-5
    assert (loss.verdict, result.verdict) == (Verdict.WITHIN_NOISE, Verdict.WITHIN_NOISE)
    assert "forward_data/log_probs" in loss.reason
    assert tensor_of(result, "kl").verdict is Verdict.WITHIN_NOISE


def test_a_loss_beside_its_intermediates_is_judged_as_one_of_a_file_of_losses() -> None:
    sections = ("loss", "is_loss")
    result = compare([noisy(0.0, 0.01, sections=sections), noisy(5e-3, 0.01, sections=sections)])
    found = {each.section: each.verdict for each in result.pairs[0].tensors if each.name == "loss"}
    assert found == dict.fromkeys(("loss", "is_loss"), Verdict.WITHIN_NOISE)
    assert result.verdict is Verdict.WITHIN_NOISE, result.reason


def test_another_coefficient_shows_through_the_noise() -> None:
    result = compare([noisy(0.0, 0.01), noisy(5e-3, 0.03)])
    assert tensor_of(result, "loss").verdict is Verdict.DIFFERENT
    assert tensor_of(result, "pg_loss").verdict is Verdict.WITHIN_NOISE
    assert (
        result.pairs[0].causes[0].title.startswith("the loss")
        or "coefficient" in result.pairs[0].causes[0].title
    )
    result = compare([noisy(0.0, 0.01), noisy(5e-3, 0.01, metric=0.05)])
    assert tensor_of(result, "kl").verdict is Verdict.DIFFERENT


def test_a_loss_of_equal_inputs_is_compared_by_its_tolerance() -> None:
    result = compare([noisy(0.0, 0.01), noisy(0.0, 0.0101)])
    assert tensor_of(result, "log_probs").verdict is Verdict.SAME
    assert tensor_of(result, "loss").verdict is Verdict.DIFFERENT
