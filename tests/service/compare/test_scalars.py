"""Numbers of ranks and parts: how they pair, and when they differ by more than noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.support.memory_dumps import MemoryDump, batch, record, split

from stagescope.comparison_report import as_lines
from stagescope_service.compare.comparison import compare
from stagescope_service.compare.report.as_json import as_json
from stagescope_service.compare.results import PairResult, TensorResult, Verdict
from stagescope_service.dumps.records import DumpContents, Location
from stagescope_wire.schema import Part

Array = npt.NDArray[np.generic]
LOG_PROB, UPDATE = "actor_compute_log_prob", "actor_update"
SAMPLES = [f"s{number}" for number in range(8)]


def at(original: DumpContents, **coordinates: Any) -> DumpContents:
    """The record at another location, in a file of its own."""
    location = original.entry.location._replace(**coordinates)
    path = Path(f"{original.entry.section}/{location}.safetensors")
    return dataclasses.replace(
        original, entry=dataclasses.replace(original.entry, location=location, path=path)
    )


def rows(section: str, samples: Sequence[str], coordinates: Mapping[str, Any]) -> DumpContents:
    width = 6
    values = {
        name: np.stack(
            [np.random.default_rng([int(s[1:]), k]).random(width, np.float32) for s in samples]
        )
        for k, name in enumerate(("old_log_probs", "log_probs"))
        if name.startswith("old") == (section == "old_log_probs")
    }
    tensors: dict[str, Array] = {
        **values,
        "response_mask": np.ones((len(samples), width), np.int64),
    }
    found = record(section, tensors, samples=tuple(samples), mask="response_mask")
    return at(found, **coordinates)


def run(*, one_file: bool = False, entropy: float = 0.5) -> MemoryDump:
    """A step of two ranks: log-probs of each rank's samples, then an update of two minibatches.

    `one_file`: the log-probs are one file of the driver's, as an export of NexRL's layout has them.
    """
    records = []
    for rank in range(2):
        mine = SAMPLES[4 * rank : 4 * rank + 4]
        coordinates = {"stage": LOG_PROB, "role": "actor", "rank": rank}
        if not one_file:
            records.append(rows("old_log_probs", mine, coordinates))
        logged = {"entropy": entropy + rank}
        records.append(at(record("metrics", numbers=logged), **coordinates))
        # Minibatches take their samples from each other's rank, as a shuffle does.
        for minibatch in range(2):
            part = Part(minibatch=minibatch)
            chosen = SAMPLES[2 * minibatch + rank :: 4]
            coordinates = {"stage": UPDATE, "role": "actor", "rank": rank, "part": part}
            records.append(rows("forward_data", chosen, coordinates))
            loss = {"loss": 0.25 * (1 + rank) + minibatch}
            records.append(at(record("loss", numbers=loss), **coordinates))
    if one_file:
        coordinates = {"stage": LOG_PROB, "role": "driver", "rank": 0}
        records.append(rows("old_log_probs", SAMPLES, coordinates))
    return MemoryDump(records, about={"settings": {"keep": {"what": ["all"] if one_file else []}}})


def tensor(pair: PairResult, name: str) -> TensorResult:
    return next(each for each in pair.tensors if each.name == name)


def locations(found: TensorResult) -> set[tuple[Location, Location]]:
    return {each.comparison.locations for each in found.shards}


@pytest.mark.parametrize("swapped", [False, True])
def test_numbers_pair_by_stage_rank_and_part_if_one_side_has_no_sample_ids(
    swapped: bool,
) -> None:
    sides = [run(), run(one_file=True)]
    pair = compare(sides[::-1] if swapped else sides).pairs[0]
    for name, count in (("entropy", 2), ("loss", 4)):
        found = tensor(pair, name)
        assert (found.verdict, found.found.pairs) == (Verdict.SAME, count), found.reason
        assert all(one == other for one, other in locations(found))
    assert pair.first is None


def test_a_number_that_differs_is_still_found() -> None:
    pair = compare([run(), run(one_file=True, entropy=0.75)]).pairs[0]
    assert pair.verdict is Verdict.DIFFERENT
    assert pair.first is not None
    assert pair.first.name == "entropy"
    assert all(one == other for one, other in locations(tensor(pair, "entropy")))
    # What the two sides keep is no cause of it.
    assert not any("settings" in cause.title for cause in pair.causes)


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
    deviation: float, coefficient: float, *, steps: Sequence[int] = (0,), metric: float = 0.0
) -> MemoryDump:
    """Steps whose log-probs have noise that a measured floor covers, and the loss made of them."""
    records = []
    for step in steps:
        random = np.random.default_rng(7)
        shape = (16, 64)
        exact = -random.standard_exponential(shape)
        advantages = random.standard_normal(shape)
        entropy = random.random(shape)
        moved = exact + deviation * np.random.default_rng(step + 1).standard_normal(shape)
        policy = float(-(advantages * np.exp(moved - exact)).mean())
        tensors: dict[str, Array] = {
            "log_probs": moved.astype(np.float32),
            "response_mask": np.ones(shape, np.int64),
        }
        advantage_tensors: dict[str, Array] = {
            "advantages": advantages.astype(np.float32),
            "response_mask": np.ones(shape, np.int64),
        }
        samples = tuple(f"s{row}" for row in range(len(exact)))
        of: dict[str, Any] = {"samples": samples, "step": step, "mask": "response_mask"}
        numbers = {"pg_loss": policy, "loss": policy - coefficient * float(entropy.mean())}
        records += [
            record("forward_data", tensors, **of), record("advantages", advantage_tensors, **of),
            record("loss", numbers=numbers, step=step),
            record("metrics", numbers={"kl": policy / 2 + metric}, step=step),
        ]  # fmt: skip
    floor = {"mean": 5e-3, "max": 3e-2}
    return MemoryDump(records, about={"noise_floor": floor})


def test_a_loss_of_inputs_within_noise_is_within_noise() -> None:
    pair = compare([noisy(0.0, 0.01), noisy(5e-3, 0.01)]).pairs[0]
    assert tensor(pair, "log_probs").verdict is Verdict.WITHIN_NOISE
    loss = tensor(pair, "loss")
    assert loss.found.max_abs > 1e-5
    assert (loss.verdict, pair.verdict) == (Verdict.WITHIN_NOISE, Verdict.WITHIN_NOISE)
    assert "forward_data/log_probs" in loss.reason
    assert tensor(pair, "kl").verdict is Verdict.WITHIN_NOISE


def test_a_loss_beside_its_intermediates_is_judged_as_one_of_a_file_of_losses() -> None:
    sides = []
    for dump in (noisy(0.0, 0.01), noisy(5e-3, 0.01)):
        losses = [each.numbers for each in dump.records if each.entry.section == "loss"]
        dump.records.extend(record("is_loss", numbers=numbers) for numbers in losses)
        sides.append(dump)
    pair = compare(sides).pairs[0]
    found = {each.section: each.verdict for each in pair.tensors if each.name == "loss"}
    assert found == dict.fromkeys(("loss", "is_loss"), Verdict.WITHIN_NOISE)
    assert pair.verdict is Verdict.WITHIN_NOISE, pair.reason


def test_another_coefficient_shows_through_the_noise() -> None:
    pair = compare([noisy(0.0, 0.01), noisy(5e-3, 0.03)]).pairs[0]
    assert tensor(pair, "loss").verdict is Verdict.DIFFERENT
    assert tensor(pair, "pg_loss").verdict is Verdict.WITHIN_NOISE
    assert pair.causes[0].title.startswith("the loss") or "coefficient" in pair.causes[0].title
    pair = compare([noisy(0.0, 0.01), noisy(5e-3, 0.01, metric=0.05)]).pairs[0]
    assert tensor(pair, "kl").verdict is Verdict.DIFFERENT


def test_a_loss_of_equal_inputs_is_compared_by_its_tolerance() -> None:
    pair = compare([noisy(0.0, 0.01), noisy(0.0, 0.0101)]).pairs[0]
    assert tensor(pair, "log_probs").verdict is Verdict.SAME
    assert tensor(pair, "loss").verdict is Verdict.DIFFERENT
