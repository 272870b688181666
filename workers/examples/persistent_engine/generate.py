"""Generates a batch with a registered engine, which keeps running, and saves the batch."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from transformers import AutoTokenizer

import stagescope
from stagescope_wire.batch import Batch, Tensor
from stagescope_wire.engines import Generation, Sampling
from stagescope_workers import init

PROMPTS = ("Write a word:", "the", "2 + 2 =", "abc")
GROUP = 4
"""Answers per prompt; each one's reward is compared with the others'."""
RUN = "persistent-engine"


def reward(text: str) -> float:
    """Return the share of letters in an answer, which a few steps can change."""
    return sum(c in string.ascii_letters for c in text) / max(len(text), 1)


def to_batch(
    prompts: Sequence[Sequence[int]], generations: Sequence[Generation], run: str, step: int
) -> Batch:
    """Return the answers as a batch, one row each: prompts padded left, responses right."""
    width = max(len(each.log_probs) for each in generations)
    prompt_width = max(map(len, prompts))
    rows = len(generations)
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "prompts": np.zeros((rows, prompt_width), np.int64),
        "prompt_mask": np.zeros((rows, prompt_width), np.int8),
        "responses": np.zeros((rows, width), np.int64),
        "response_mask": np.zeros((rows, width), np.int8),
        "rollout_log_probs": np.zeros((rows, width), np.float32),
        "rewards": np.array([reward(each.text) for each in generations], np.float32),
    }
    for row, (prompt, each) in enumerate(zip(prompts, generations, strict=True)):
        assert each.token_ids is not None
        length = len(each.token_ids)
        tensors["prompts"][row, prompt_width - len(prompt) :] = prompt
        tensors["prompt_mask"][row, prompt_width - len(prompt) :] = 1
        tensors["responses"][row, :length] = each.token_ids
        tensors["response_mask"][row, :length] = 1
        tensors["rollout_log_probs"][row, :length] = each.log_probs
    return Batch(
        rows=rows,
        tensors={name: Tensor(str(values.dtype), values) for name, values in tensors.items()},
        strings={
            "sample_ids": tuple(f"{row // GROUP}-{row % GROUP}" for row in range(rows)),
            "group_ids": tuple(str(row // GROUP) for row in range(rows)),
        },
        source={"run": run, "step": step},
    )


@click.command()
@click.option("--model", required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--engine", required=True, help="A registered engine's name.")
@click.option("--output", required=True, type=click.Path(path_type=Path))
@click.option("--run", default=RUN, show_default=True)
@click.option("--step", default=1, show_default=True)
@click.option("--max-tokens", default=16, show_default=True)
def generate(model: Path, engine: str, output: Path, run: str, step: int, max_tokens: int) -> None:
    """Generate GROUP answers to each prompt and write them to OUTPUT."""
    output.parent.mkdir(parents=True, exist_ok=True)  # fails before the generation, if at all
    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    try:
        rollout = stagescope.engine(engine)
    except stagescope.StagescopeError as error:
        raise click.ClickException(str(error)) from error
    probe = init(
        run,
        role="rollout",
        rank=0,
        world_size=1,
        settings={"engine": engine},
        keep={"what": ["trajectories"]},
    )
    with probe.stage("rollout_generate", step=step) as stage:
        prompts = [tokenizer(text)["input_ids"] for text in PROMPTS for _ in range(GROUP)]
        generations = [
            rollout.generate([prompt], Sampling(max_tokens, temperature=1.0, seed=row))[0]
            for row, prompt in enumerate(prompts)
        ]
        usable = [row for row, each in enumerate(generations) if not each.problem]
        batch = to_batch(prompts, generations, run, step).take(usable)
        stage.record({name: batch[name] for name in batch if name != "prompt_mask"})
        stage.record(dict(batch.strings))
        stage.log(reward=float(batch["rewards"].mean()))
    rollout.close()
    probe.close(timeout=30)
    batch.save(output)
    print(
        f"{len(usable)} answers of {rollout.info.kind}, mean reward {batch['rewards'].mean():.3f}"
    )
    print(f"written to {output}")


if __name__ == "__main__":
    generate()
