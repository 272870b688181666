"""Hugging Face's `Trainer`.

The lines that end with `# stagescope` attach it; `python -m examples.attach.hf_trainer`.
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import Trainer, TrainingArguments

from examples.attach.task import make_batch, make_model
from stagescope_workers.integrations.huggingface import StagescopeCallback  # stagescope

STEPS = 4


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", default="hf-trainer", help="Of the trainer's output.")
    options = parser.parse_args()
    rows: Any = [
        {"input_ids": row, "labels": row} for step in range(STEPS) for row in make_batch(step)
    ]
    trainer = Trainer(
        model=make_model(),
        args=TrainingArguments(
            output_dir=options.directory,
            per_device_train_batch_size=8,
            max_steps=STEPS,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
    )
    trainer.add_callback(StagescopeCallback("hf-trainer"))  # stagescope
    trainer.train()
    for entry in trainer.state.log_history[:STEPS]:
        print(f"step {entry['step']} loss {entry['loss']}")


if __name__ == "__main__":
    main()
