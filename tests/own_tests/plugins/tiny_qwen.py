"""Writes a Qwen2 of two layers, a tokenizer and prompts, so that a training downloads nothing.

    python tiny_qwen.py FOLDER

Runs where the trainer is installed, whose transformers reads the model. `FOLDER/qwen` is the model,
`FOLDER/gsm8k` the prompts in the form of that data set, `FOLDER/prompts.jsonl` as conversations,
`FOLDER/skyrl.parquet` as SkyRL's, of two turns.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASKED_BY_AREAL = " Please put your final answer within \\boxed{}."
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train.parquet}
  - {split: test, path: main/test.parquet}
---
"""


def main(folder: Path) -> None:
    numbers = random.Random(1)
    rows = []
    for _ in range(64):
        a, b = numbers.randrange(100), numbers.randrange(100)
        question = f"Ann has {a} apples and buys {b} more. How many has she?"
        rows.append({"question": question, "answer": f"{a}+{b}={a + b}\n#### {a + b}"})
    data = folder / "gsm8k" / "main"
    data.mkdir(parents=True)
    for split, chosen in (("train", rows), ("test", rows[:8])):
        pyarrow.parquet.write_table(pa.Table.from_pylist(chosen), data / f"{split}.parquet")
    (folder / "gsm8k" / "README.md").write_text(CARD)
    conversations = (
        {"input": [{"role": "user", "content": row["question"]}], "label": row["answer"]}
        for row in rows
    )
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in conversations)
    )

    prompts = [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "env_class": "gsm8k_multi_turn",
            "reward_spec": {"method": "rule", "ground_truth": row["answer"].split()[-1]},
            "extra_info": {"max_turns": 2},
        }
        for row in rows
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(prompts), folder / "skyrl.parquet")

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[PAD, START, END], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(
        [row["question"] + row["answer"] + ASKED_BY_AREAL for row in rows], trainer
    )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END
    )
    fast.chat_template = CHAT
    fast.save_pretrained(folder / "qwen")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096,
        initializer_range=0.1, tie_word_embeddings=False, pad_token_id=0, eos_token_id=2,
        bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.bfloat16()
    model.save_pretrained(folder / "qwen")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
