"""The tiny model and the data set of sums, generated from a seed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.verl_cpu.tokenizer import END, PAD, TOKENS, save_tokenizer

PROMPTS: Final = 64


def make_assets(folder: Path, seed: int) -> None:
    """Write `model/` and `prompts.parquet` into `folder`, once: a resumed training finds them."""
    if folder.exists():
        return
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _save_model(partial / "model", seed)
    save_tokenizer(partial / "model")
    table = pa.Table.from_pylist(_sums(seed))
    pyarrow.parquet.write_table(table, partial / "prompts.parquet")
    partial.rename(folder)


def _save_model(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,  # far from uniform, so that log-probs differ from token to token
        tie_word_embeddings=False,
        pad_token_id=TOKENS.index(PAD),
        eos_token_id=TOKENS.index(END),
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def _sums(seed: int) -> list[dict[str, Any]]:
    numbers = random.Random(seed)
    rows = []
    for index in range(PROMPTS):
        first, second = (numbers.randrange(10 ** numbers.randint(1, 3)) for _ in range(2))
        rows.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{first}+{second}"}],
                "reward_model": {"style": "rule", "ground_truth": str(first + second)},
                "extra_info": {"index": index},
            }
        )
    return rows
