"""A GRPO training of TRL's on CPU: `stagescope run -- python -m examples.trl_cpu.train`.

The policy of `examples.countdown` plays its puzzles over several rounds, with a calculator between
them. The rollout engine is a real other one, CTranslate2 in int8; with `--generate transformers`
TRL generates itself, in one round, and hands over no log-probs.

Nothing here imports stagescope.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from examples.countdown.config import Settings
from examples.countdown.engine import Engine
from examples.countdown.environment import Puzzle, Sample, make_samples, play, score
from examples.countdown.model import make_policy
from examples.countdown.tokenizer import ANSWER, PAD, write_tokenizer


class Rollouts:
    """TRL's `rollout_func`: plays the puzzles of a batch with the trainer's weights of now."""

    def __init__(self, settings: Settings, puzzles: dict[str, Puzzle]) -> None:
        self.settings = settings
        self._puzzles = puzzles
        self._engine = Engine(settings.engine)
        self._calls = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[object]]:
        """Return the columns that TRL expects of a `rollout_func`, and the puzzles' scores."""
        model = trainer.accelerator.unwrap_model(trainer.model)
        weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
        self._calls += 1
        self._engine.load(weights, seed=self.settings.seed * 1000 + self._calls)
        samples = [Sample(self._puzzles[text], text, self.settings) for text in prompts]
        budget = self.settings.round_tokens
        play(samples, lambda now: self._engine.generate([each.context for each in now], budget))
        return {
            "prompt_ids": [sample.prompt for sample in samples],
            "completion_ids": [sample.tokens for sample in samples],
            "logprobs": [sample.log_probs for sample in samples],
            "env_mask": [sample.mask for sample in samples],
            "score": [score(each.puzzle, each.answer, each.results) for each in samples],
        }


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer of `examples.countdown`, a character a token."""
    path = directory / "tokenizer.json"
    write_tokenizer(path)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(path),
        pad_token=PAD,
        eos_token=ANSWER,
        clean_up_tokenization_spaces=False,
    )


def scored(
    completions: list[str], score: list[float] | None = None, **_: object
) -> list[float | None]:
    """Return the puzzles' scores where the rollout has them, and a little for written digits."""
    if score is not None:
        return [value + _digits(text) for value, text in zip(score, completions, strict=True)]
    return [_digits(text) for text in completions]


def _digits(text: str) -> float:
    """Return a reward that also an untrained policy gets."""
    return sum(character.isdigit() for character in text) / 100


def make_trainer(options: argparse.Namespace) -> GRPOTrainer:
    """Return TRL's trainer, ready for `train()`."""
    directory = Path(options.directory)
    directory.mkdir(parents=True, exist_ok=True)
    settings = Settings(seed=options.seed, groups=options.groups, group_size=4)
    puzzles = {
        sample.puzzle.prompt: sample.puzzle
        for step in range(options.steps)
        for sample in make_samples(settings, step)
    }
    arguments = GRPOConfig(
        output_dir=str(directory),
        run_name=options.name,
        max_steps=options.steps,
        per_device_train_batch_size=options.groups * 2,
        gradient_accumulation_steps=2,
        steps_per_generation=options.steps_per_generation,
        num_generations=settings.group_size,
        max_completion_length=128,
        learning_rate=1e-3,
        beta=options.beta,
        logging_steps=1,
        report_to=options.report_to.split(",") if options.report_to else [],
        save_strategy="steps" if options.save_steps else "no",
        save_steps=options.save_steps or 500,
        use_cpu=True,
        bf16=False,
        seed=options.seed,
        disable_tqdm=True,
    )
    # A path: TRL loads the reference, where there is one, from where the policy came from.
    policy: Any = make_policy(options.seed)
    policy.save_pretrained(directory / "policy")
    rollouts = Rollouts(dataclasses.replace(settings, engine=options.engine), puzzles)
    return GRPOTrainer(
        model=str(directory / "policy"),
        reward_funcs=scored,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": list(puzzles)}),
        processing_class=make_tokenizer(directory),
        rollout_func=rollouts if options.generate == "ctranslate2" else None,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="trl-cpu", help="For logs and checkpoints.")
    parser.add_argument("--name", default="trl-countdown", help="Of the run.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--groups", type=int, default=4, help="Puzzles of a generation batch.")
    parser.add_argument("--steps-per-generation", type=int, default=2)
    parser.add_argument("--engine", choices=("int8", "float32"), default="int8")
    parser.add_argument(
        "--generate", choices=("ctranslate2", "transformers"), default="ctranslate2"
    )
    parser.add_argument("--beta", type=float, default=0.0, help="Of the KL to the reference.")
    parser.add_argument("--report-to", default="tensorboard", help="TRL's report_to.")
    parser.add_argument("--save-steps", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="From the last checkpoint.")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    """Train."""
    options = parse()
    torch.set_num_threads(1)
    make_trainer(options).train(resume_from_checkpoint=options.resume or None)


if __name__ == "__main__":
    main()
