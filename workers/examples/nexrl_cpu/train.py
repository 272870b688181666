"""NexRL's GRPO on CPU: `stagescope run -- python -m examples.nexrl_cpu.train --directory D`.

A checkout of NexRL 1.4 is on PYTHONPATH. The arguments after `--directory D` are Hydra's overrides
of the recipe, as `python -m nexrl.main` accepts them. Nothing here imports stagescope.
"""

# NexRL is not installed where this is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from examples.countdown.tokenizer import ANSWER, PAD, write_tokenizer
from examples.nexrl_cpu import service


def main() -> None:
    """Train as `python -m nexrl.main` does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="nexrl-cpu", help="EXPERIMENT_PATH of NexRL.")
    parser.add_argument("--recipe", default=str(Path(__file__).with_name("recipe.yaml")))
    parser.add_argument("overrides", nargs="*", help="Such as trainer.total_train_steps=2.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory, recipe = Path(options.directory).absolute(), Path(options.recipe).absolute()
    _write_tokenizer(directory / "tokenizer")
    os.environ["EXPERIMENT_PATH"], os.environ["TRAIN_CONFIG"] = str(directory), str(recipe)

    service.prepare()
    service.install()
    from nexrl.main import main as train

    where = [f"--config-path={recipe.parent}", f"--config-name={recipe.stem}"]
    sys.argv = [sys.argv[0], *where, f"hydra.run.dir={directory}", *options.overrides]
    train()


def _write_tokenizer(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "tokenizer.json")
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(directory / "tokenizer.json"), pad_token=PAD, eos_token=ANSWER
    ).save_pretrained(directory)


if __name__ == "__main__":
    main()
