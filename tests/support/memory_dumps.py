"""Dumps in memory: trajectories split and padded in any way, as a reader would give them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stagescope_service.compare.results import DumpComparison, TensorResult
from stagescope_service.dumps.records import DumpContents, DumpEntry, DumpProblem, Location
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.schema import Part
from stagescope_wire.tensorfile import Array, WireTensor


@dataclasses.dataclass
class MemoryDump:
    """What was put into it; an entry of `broken` cannot be read."""

    records: list[DumpContents]
    name: str = "memory"
    kind: str = "own"
    problems: Sequence[DumpProblem] = ()
    about: Mapping[str, object] = dataclasses.field(default_factory=dict)
    broken: frozenset[Path] = frozenset()
    reads: list[DumpEntry] = dataclasses.field(default_factory=list)

    @property
    def entries(self) -> list[DumpEntry]:
        return [record.entry for record in self.records]

    def read(self, entry: DumpEntry) -> DumpContents:
        self.reads.append(entry)
        if entry.path in self.broken:
            raise InvalidTensor(f"{entry.path} is truncated", advice="write it again")
        return next(record for record in self.records if record.entry == entry)

    def without(self, *paths: Path) -> MemoryDump:
        left = [record for record in self.records if record.entry.path not in paths]
        return dataclasses.replace(self, records=left)


def record(
    section: str,
    tensors: Mapping[str, Array] | None = None,
    *,
    rank: int | None = 0,
    microbatch: int = 0,
    step: int | None = 0,
    stage: str | None = None,
    numbers: Mapping[str, float | int] | None = None,
    dtypes: Mapping[str, str] | None = None,
    **named: Any,
) -> DumpContents:
    """A record of padded tensors; bfloat16 ones are uint16 and named in `dtypes`."""
    location = Location(step, stage, None, rank, Part(microbatch=microbatch))
    path = Path(f"{section}/step_{step}_rank{rank}_micro{microbatch}.safetensors")
    wire = {
        name: ((dtypes or {}).get(name, str(values.dtype)), values.shape, values, None)
        for name, values in (tensors or {}).items()
    }
    size = sum(values.nbytes for values in (tensors or {}).values())
    return DumpContents(DumpEntry(section, location, path, size), wire, numbers or {}, **named)


def single(section: str, tensors: Mapping[str, Array] | None = None, **fields: Any) -> MemoryDump:
    """A dump of one record; see `record`."""
    return MemoryDump([record(section, tensors, **fields)])


def tensor_of(result: DumpComparison, name: str, section: str | None = None) -> TensorResult:
    """The first tensor of a name in the first pair of sides."""
    found = (each for each in result.pairs[0].tensors if each.name == name)
    return next(each for each in found if section in (None, each.section))


@dataclasses.dataclass(frozen=True)
class Sample:
    """One trajectory; `values` are of its tokens by name, all of one length."""

    sample: str
    prompt: Array
    response: Array
    mask: Array
    values: Mapping[str, Array]
    reward: float

    def with_values(self, **values: Array) -> Sample:
        return dataclasses.replace(self, values={**self.values, **values})


def batch(count: int = 6, *, seed: int = 0, longest: int = 9) -> list[Sample]:
    """Trajectories of different lengths, some with a round of the environment in between."""
    random = np.random.default_rng(seed)
    samples = []
    for at in range(count):
        length = int(random.integers(1, longest + 1))
        mask = np.ones(length, np.int64)
        if length > 3:
            mask[length // 2] = 0
        log_probs = -random.standard_exponential(length).astype(np.float32)
        values = {
            "rollout_log_probs": log_probs,
            "old_log_probs": log_probs + np.float32(1e-3),
            "entropy": random.random(length).astype(np.float32),
        }
        prompt = np.array([at // 2, *random.integers(0, 50, 3)], np.int64)
        response = random.integers(0, 50, length)
        reward = float(random.random())
        samples.append(Sample(f"{at // 2}_{at % 2}", prompt, response, mask, values, reward))
    return samples


def shifted(samples: Sequence[Sample], name: str, by: float) -> list[Sample]:
    """The samples with each value of a tensor moved."""
    return [each.with_values(**{name: each.values[name] + np.float32(by)}) for each in samples]


def split(
    samples: Sequence[Sample],
    shares: Sequence[Sequence[int]] | None = None,
    *,
    width: int = 12,
    left: bool = False,
    ids: bool = True,
    ragged: bool = False,
    name: str = "memory",
    microbatches: int = 1,
    edit: Callable[[DumpContents], DumpContents] | None = None,
) -> MemoryDump:
    """A dump whose shard i holds the samples `shares[i]`, padded to `width`.

    Shard i is microbatch `i % microbatches` of rank `i // microbatches`.
    """
    shares = [list(range(len(samples)))] if shares is None else shares
    records = []
    for at, share in enumerate(shares):
        rows = [samples[row] for row in share]
        texts = tuple(row.sample for row in rows) if ids else None
        rank, microbatch = divmod(at, microbatches)
        for section, make in (("trajectories", _trajectories), ("forward_data", _forward)):
            tensors = make(rows, width, left, ragged)
            size = sum(each[2].nbytes for each in tensors.values())
            location = Location(0, None, None, rank, Part(microbatch=microbatch))
            path = Path(f"{name}/{section}/rank{rank}_micro{microbatch}")
            entry = DumpEntry(section, location, path, size)
            made = DumpContents(entry, tensors, samples=texts, mask="response_mask")
            records.append(made if edit is None else edit(made))
    return MemoryDump(records, name)


def _trajectories(
    rows: Sequence[Sample], width: int, left: bool, ragged: bool
) -> dict[str, WireTensor]:
    rewards = np.array([row.reward for row in rows])
    return {
        "prompts": _packed([row.prompt for row in rows]),
        "responses": _laid([row.response for row in rows], width, left, ragged),
        "response_mask": _laid([row.mask for row in rows], width, left, ragged),
        "rollout_log_probs": _laid(
            [row.values["rollout_log_probs"] for row in rows], width, left, ragged
        ),
        "rewards": ("float64", rewards.shape, rewards, None),
    }


def _forward(rows: Sequence[Sample], width: int, left: bool, ragged: bool) -> dict[str, WireTensor]:
    return {
        "response_mask": _laid([row.mask for row in rows], width, left, ragged),
        **{
            name: _laid([row.values[name] for row in rows], width, left, ragged)
            for name in ("old_log_probs", "entropy")
        },
    }


def _laid(rows: Sequence[Array], width: int, left: bool, ragged: bool) -> WireTensor:
    if ragged:
        return _packed(rows)
    # What lies in the padding is never the same on two sides.
    filler = width + 100 * left
    kind = rows[0].dtype if rows else np.dtype(np.int64)
    is_mask = bool(rows) and kind == np.int64 and all(set(row.tolist()) <= {0, 1} for row in rows)
    values = np.full((len(rows), width), 0 if is_mask else filler, kind)
    for at, row in enumerate(rows):
        start = width - len(row) if left else 0
        values[at, start : start + len(row)] = row
    return (str(kind), values.shape, values, None)


def _packed(rows: Sequence[Array]) -> WireTensor:
    flat = np.concatenate(rows) if rows else np.empty(0, np.int64)
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return (str(flat.dtype), flat.shape, flat, offsets)
