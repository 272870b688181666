"""Samples as arrays, which the driver, the rollout actor and the ranks exchange."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from examples.countdown.environment import Puzzle, Sample
from examples.countdown.tokenizer import PAD_ID


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one step. Responses are padded on the right, prompts are of one length."""

    puzzles: tuple[Puzzle, ...]
    answers: tuple[int | None, ...]
    results: tuple[tuple[int, ...], ...]
    """The calculator's results of each row, for calls that used available numbers."""
    sample_ids: tuple[str, ...]
    """group id and index in the group: unique in a step."""
    group_ids: tuple[str, ...]
    prompts: np.ndarray
    """int64 [rows, prompt tokens]"""
    responses: np.ndarray
    """int64 [rows, tokens]"""
    response_mask: np.ndarray
    """int64 [rows, tokens]: 1 = written by the model, 0 = by the environment, or padding."""
    turn_ids: np.ndarray
    """int64 [rows, tokens]: the round in which a token was written, -1 at padding."""
    rollout_log_probs: np.ndarray
    """float32 [rows, tokens], 0 where the mask is 0."""
    policy_version: int
    columns: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """Added by later stages, [rows] or [rows, tokens] each."""
    engine: str = ""
    """The instance that sampled the rows; empty: none did."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def input_ids(self) -> np.ndarray:
        """Prompts and responses, int64 [rows, prompt tokens + tokens]."""
        return np.concatenate([self.prompts, self.responses], axis=1)

    def trajectories(self) -> dict[str, object]:
        """Return the rollout by stagescope's names: all the input of a step's training."""
        return {
            "prompts": self.prompts,
            "responses": self.responses,
            "response_mask": self.response_mask,
            "turn_ids": self.turn_ids,
            "rollout_log_probs": self.rollout_log_probs,
            **self.origins(),
            "sample_ids": list(self.sample_ids),
            "group_ids": list(self.group_ids),
            "run_ids": [uid.rpartition("-")[2] for uid in self.sample_ids],
            "numbers": np.array([puzzle.numbers for puzzle in self.puzzles], np.int64),
            "targets": np.array([puzzle.target for puzzle in self.puzzles], np.int64),
            "solutions": [" ".join(puzzle.solution) for puzzle in self.puzzles],
            "answers": ["" if answer is None else str(answer) for answer in self.answers],
            "results": [np.array(found, np.int64) for found in self.results],
        }

    def origins(self) -> dict[str, object]:
        """Return each row's origin by stagescope's names: the versions of its tokens, the engine's
        instance, and a name of its prompt that is the same in every step."""
        found: dict[str, object] = {
            "versions": np.full(self.responses.shape, self.policy_version),
            "prompt_hashes": [
                hashlib.blake2b(prompt.tobytes(), digest_size=8).hexdigest()
                for prompt in self.prompts
            ],
        }
        return found | ({"engine_ids": [self.engine] * len(self)} if self.engine else {})

    def counts(self) -> dict[str, float]:
        """Rounds and tokens of a response, on average."""
        tokens = float((self.turn_ids >= 0).sum() / len(self))
        return {"rounds": float(self.round_counts.mean()), "response_tokens": tokens}

    @property
    def round_counts(self) -> np.ndarray:
        """Rounds of each row, int64 [rows]."""
        counts: np.ndarray = self.turn_ids.max(axis=1) + 1
        return counts

    def with_columns(self, **columns: np.ndarray) -> Batch:
        """Return this batch with more columns."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    def select_rows(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """Return some rows, without unnecessary columns of padding."""
        index = np.asarray(rows)
        lengths = (self.turn_ids[index] >= 0).sum(axis=1)
        width = int(lengths.max())

        def pick(array: np.ndarray) -> np.ndarray:
            return array[index, :width] if array.ndim == 2 else array[index]

        return dataclasses.replace(
            self,
            puzzles=tuple(self.puzzles[row] for row in index),
            answers=tuple(self.answers[row] for row in index),
            results=tuple(self.results[row] for row in index),
            sample_ids=tuple(self.sample_ids[row] for row in index),
            group_ids=tuple(self.group_ids[row] for row in index),
            prompts=self.prompts[index],
            responses=pick(self.responses),
            response_mask=pick(self.response_mask),
            turn_ids=pick(self.turn_ids),
            rollout_log_probs=pick(self.rollout_log_probs),
            columns={name: pick(array) for name, array in self.columns.items()},
        )

    def shards(self, count: int) -> list[Batch]:
        """Return equal ranges of rows, one for each data-parallel rank."""
        return [self.select_rows(rows) for rows in np.split(np.arange(len(self)), count)]

    def gather(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Concatenate the shards' results, padded with 0 to the width of the full batch."""
        if parts[0].ndim == 1:
            return np.concatenate(parts)
        width = self.responses.shape[1]
        return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1]))) for p in parts])


def make_batch(samples: Sequence[Sample], policy_version: int, engine: str = "") -> Batch:
    """Pad finished samples into a batch; `uid` of a sample is `{group}-{index}`."""
    width = max(len(sample.tokens) for sample in samples)

    def pad(rows: Sequence[Sequence[float]], value: float, dtype: type) -> np.ndarray:
        out: np.ndarray = np.full((len(rows), width), value, dtype)
        for index, row in enumerate(rows):
            out[index, : len(row)] = row
        return out

    return Batch(
        puzzles=tuple(sample.puzzle for sample in samples),
        answers=tuple(sample.answer for sample in samples),
        results=tuple(tuple(sample.results) for sample in samples),
        sample_ids=tuple(sample.uid for sample in samples),
        group_ids=tuple(sample.uid.rsplit("-", 1)[0] for sample in samples),
        prompts=np.array([sample.prompt for sample in samples], np.int64),
        responses=pad([s.tokens for s in samples], PAD_ID, np.int64),
        response_mask=pad([s.mask for s in samples], 0, np.int64),
        turn_ids=pad([s.turns for s in samples], -1, np.int64),
        rollout_log_probs=pad([s.log_probs for s in samples], 0.0, np.float32),
        policy_version=policy_version,
        engine=engine,
    )
