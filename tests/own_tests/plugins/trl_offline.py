"""What TRL's own tests load from Hugging Face's hub, made here: small models, datasets of one kind.

As a pytest plugin it answers `load_dataset`; as a command it writes models into a hub's cache,
where transformers finds them by its own means::

    HF_HOME=FOLDER python -m trl_offline NAME ...

Models are random, of the class that their name tells. One byte-level tokenizer is trained on
the sentences of the datasets; chat templates are those of the TRL that is tried. It runs in a
folder of its own on PYTHONPATH: TRL has a package `tests`, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any, Final

import datasets
import transformers

OWNER: Final = "trl-internal-testing"
_REVISION: Final = "0" * 40
_NAME: Final = re.compile(
    r"(?:tiny|small)-(?P<kind>\w+?)For(?P<head>CausalLM|SequenceClassification)"
)
_SIZES: Final = {
    "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 2, "max_position_embeddings": 32_768,
    "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "num_local_experts": 4, "n_routed_experts": 4, "first_k_dense_replace": 1,
}  # fmt: skip
"""Of every model, as far as its configuration has them."""
_TEMPLATES: Final = {"Qwen3": "qwen3", "Qwen3Moe": "qwen3", "Llama": "llama3_2"}
"""Kind of model -> chat template, in TRL's own folder of them; else that of Qwen 2.5."""
_SPECIAL: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
_PAIRS: Final = (
    ("Better ask before the branch is", "pushed."),
    ("A test that never fails shows", "nothing."),
    ("Two numbers that differ are", "a question."),
    ("The log is read by", "tired people."),
    ("The smallest change is", "the safest one."),
    ("Nothing waits for a service that is", "away."),
)
"""Prompts, and what completes them; the last two are the test split."""


def rows(config: str, split: str) -> datasets.Dataset:
    """Return a dataset by the kind of its columns, such as `standard_prompt_only`."""
    pairs = _PAIRS[-2:] if split == "test" else _PAIRS[:-2]

    def message(role: str, text: str) -> object:
        return [{"role": role, "content": text}] if config.startswith("conversational") else text

    columns = {
        "prompt": [message("user", prompt) for prompt, _ in pairs],
        "completion": [message("assistant", completion) for _, completion in pairs],
    }
    if config.endswith("prompt_only"):
        del columns["completion"]
    return datasets.Dataset.from_dict(columns)


def _load(function: Any, path: str, name: str = "", *args: Any, **kwargs: Any) -> Any:
    if path != f"{OWNER}/zen":
        return function(path, *([name] if name else []), *args, **kwargs)
    split, is_streamed = kwargs.get("split"), kwargs.get("streaming", False)
    found: dict[Any, Any] = {each: rows(name, each) for each in ("train", "test")}
    if is_streamed:
        streams: dict[Any, Any] = {
            each: dataset.to_iterable_dataset() for each, dataset in found.items()
        }
        return streams[split] if split else datasets.IterableDatasetDict(streams)
    return found[split] if split else datasets.DatasetDict(found)


def pytest_configure() -> None:
    """Answer `load_dataset`, before a test module imports it by name."""
    datasets.load_dataset = functools.partial(_load, datasets.load_dataset)


def tokenizer(kind: str) -> Any:
    """Return a trained tokenizer with the chat template of a kind of model."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[*_SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator((" ".join(pair) for pair in _PAIRS), trainer)
    folder = Path(trl.__path__[0]) / "chat_templates"
    made: Any = transformers.PreTrainedTokenizerFast
    return made(
        tokenizer_object=built,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=(folder / f"{_TEMPLATES.get(kind, 'qwen2_5')}.jinja").read_text(),
    )


def model(kind: str, head: str, vocabulary: Any) -> Any:
    """Return a random model of a class of transformers."""
    configuration = getattr(transformers, f"{kind}Config")
    sizes = {name: value for name, value in _SIZES.items() if hasattr(configuration(), name)}
    made = configuration(
        **sizes,
        vocab_size=len(vocabulary),
        pad_token_id=vocabulary.pad_token_id,
        eos_token_id=vocabulary.eos_token_id,
        bos_token_id=None,
        **({"num_labels": 1} if head == "SequenceClassification" else {}),
    )
    transformers.set_seed(0)
    return getattr(transformers, f"{kind}For{head}")(made)


def write(name: str, home: Path) -> None:
    """Write the model of that name, and its tokenizer, into the cache of a hub."""
    found = _NAME.match(name)
    assert found is not None, f"no model can be made by the name {name}"
    place = home / "hub" / f"models--{OWNER}--{name}"
    folder = place / "snapshots" / _REVISION
    folder.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs/main").write_text(_REVISION)
    vocabulary = tokenizer(found["kind"])
    vocabulary.save_pretrained(folder)
    model(found["kind"], found["head"], vocabulary).save_pretrained(folder)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        with contextlib.suppress(AttributeError):  # transformers has no such model
            write(each, Path(os.environ["HF_HOME"]))
