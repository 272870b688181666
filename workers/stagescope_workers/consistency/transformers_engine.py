"""The model in transformers, in this process: the reference for other engines.

Log-probs are `log_softmax` of the float32 logits over the full vocabulary, at temperature 1 by
default. Only local files are read, and weights only from safetensors.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope_wire.engines import EngineInfo, Generation, Prompt, Sampling, vision_part
from stagescope_wire.engines.base import GREEDY, check_ids, check_prompt
from stagescope_wire.errors import InvalidInput, MissingExtra, NotFound
from stagescope_wire.nonfinite import JsonObject
from stagescope_wire.versions import install_command
from stagescope_workers.consistency.prompts import Tokenizer

try:
    import torch
    import transformers
except ImportError as error:
    raise MissingExtra(
        f"transformers needs {error.name}, which is not installed",
        advice=f"pip install torch transformers, or {install_command('example')}",
    ) from error

_POSITIONS: Final = 512
"""Positions whose logits are converted to float32 at a time: a vocabulary of 150 k needs 300 MB."""
_DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "float64")


class TransformersEngine:
    """A loaded model directory.

    Args:
        path: with config.json, *.safetensors and the tokenizer's files.
        dtype: dtype of weights and arithmetic; "auto" is the weights' own.
        device: as torch names it; None: an accelerator where there is one.

    Raises:
        NotFound: no such directory, or nothing that can be loaded in it.
        InvalidInput: another dtype.
    """

    def __init__(self, path: Path, dtype: str = "auto", device: str | None = None) -> None:
        if dtype not in _DTYPES:
            raise InvalidInput(f"dtype is {dtype!r:.50}", expected=f"one of {', '.join(_DTYPES)}")
        with _loading(path):
            config: Any = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            self.config: JsonObject = config.to_dict()
            self.sees = vision_part(self.config) is not None
            auto: Any = (
                transformers.AutoModelForImageTextToText
                if self.sees
                else transformers.AutoModelForCausalLM
            )
            torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
            model = auto.from_pretrained(
                path, dtype=torch_dtype, local_files_only=True, use_safetensors=True
            )
        self._path = path
        self._model: Any = model.to(device or _device()).eval()
        defaults = model.generation_config
        # The defaults of each call: those in the model's file may cut, scale or penalise.
        model.generation_config = _generation_config(
            eos_token_id=defaults.eos_token_id,
            pad_token_id=defaults.pad_token_id if defaults.pad_token_id is not None else 0,
        )
        self.tokenizer = load_tokenizer(path)
        self._processor: Any = None
        self.info = EngineInfo(
            kind="transformers",
            place=str(path),
            model=str(path),
            model_path=str(path),
            version=importlib.metadata.version("transformers"),
            dtype=str(self._model.dtype).removeprefix("torch."),
            processed=False,
            multimodal=self.sees,
            scores=True,
            architectures=tuple(self.config.get("architectures") or ()),
        )

    def close(self) -> None:
        """Release the model."""
        self._model = None

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the log-prob of each given token; see `Engine.score`."""
        return self.score_at(rows, 1.0)

    def score_at(
        self, rows: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """Return log-probs after the logits were divided by `temperature`.

        For comparison with engines that return such log-probs.
        """
        size = int(self._model.get_input_embeddings().num_embeddings)
        checked = [check_ids(row) for row in rows]
        for row in checked:
            if row and max(row) >= size:
                raise InvalidInput(
                    f"token {max(row)} is beyond the model's vocabulary of {size}",
                    expected="token ids of this model",
                    advice="was it this model that generated them?",
                )
        return [self._score(row, temperature) for row in checked]

    def _score(self, row: list[int], temperature: float) -> tuple[float, ...]:
        # One row at a time: padding could make a difference.
        ids = torch.tensor([row], device=self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
            found = token_log_probs(logits, ids[0, 1:], temperature)
        return (math.nan, *found)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling = GREEDY) -> list[Generation]:
        """Continue each prompt; see `Engine.generate`."""
        rows = [
            self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            for prompt in map(check_prompt, prompts)
        ]
        with _seeded(sampling.seed):
            return [
                self._generate({"input_ids": torch.tensor([row])}, sampling, len(row))
                for row in rows
            ]

    def chat(
        self, conversations: Sequence[Sequence[JsonObject]], sampling: Sampling = GREEDY
    ) -> list[Generation]:
        """Answer conversations whose parts may be `{"type": "image", "path": FILE}`.

        Raises:
            InvalidInput: the model has no vision part.
        """
        if not self.sees:
            raise InvalidInput(
                f"the model in {self._path} has no part that sees images",
                expected="prompts without images, or another model",
            )
        if self._processor is None:
            with _loading(self._path):
                auto: Any = transformers.AutoProcessor
                self._processor = auto.from_pretrained(self._path, local_files_only=True)
        found = []
        with _seeded(sampling.seed):
            for messages in conversations:
                inputs = self._processor.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=True, return_dict=True,
                    return_tensors="pt",
                )  # fmt: skip
                found.append(self._generate(inputs, sampling, inputs["input_ids"].shape[1]))
        return found

    def _generate(self, inputs: JsonObject, options: Sampling, length: int) -> Generation:
        model = self._model
        tensors = {name: value.to(model.device) for name, value in inputs.items()}
        tensors.setdefault("attention_mask", torch.ones_like(tensors["input_ids"]))
        config = _generation_config(
            max_new_tokens=options.max_tokens,
            do_sample=options.temperature > 0,
            temperature=options.temperature or None,
            top_p=options.top_p if options.temperature > 0 else None,
            top_k=options.top_k if options.temperature > 0 else None,
            stop_strings=list(options.stop) or None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.inference_mode():
            made = model.generate(
                **tensors,
                generation_config=config,
                tokenizer=self.tokenizer if options.stop else None,
            )
            ids = made.sequences[0, length:]
            values = token_log_probs(torch.cat(made.logits)[: len(ids)], ids, 1.0)
        token_ids = tuple(ids.tolist())
        return Generation(
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            token_ids=token_ids,
            log_probs=tuple(values),
            prompt_tokens=length,
            finish_reason="length" if len(token_ids) == options.max_tokens else "stop",
        )


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a model directory.

    Raises:
        NotFound: it has no tokenizer.
    """
    with _loading(path):
        auto: Tokenizer = transformers.AutoTokenizer
        return auto.from_pretrained(path, local_files_only=True)


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    if not (path / "config.json").is_file():
        raise NotFound(
            f"{str(path)!r} is not a model directory", expected="a directory with config.json"
        )
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        text = " ".join(str(error).split())[:300]
        raise NotFound(
            f"{str(path)!r} cannot be loaded: {text}",
            expected="config.json, *.safetensors and a tokenizer, of a model that transformers has",
        ) from error


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed the random generators inside, and restore their state afterwards."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def token_log_probs(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> list[float]:
    """Return the log-softmax of `logits` [positions, vocabulary] at `ids` [positions]."""
    found: list[float] = []
    for start in range(0, len(ids), _POSITIONS):
        piece = slice(start, start + _POSITIONS)
        values = logits[piece]
        values = values if values.dtype == torch.float64 else values.float()
        if temperature != 1.0:
            values = values / temperature
        selected = values.gather(-1, ids[piece, None].to(values.device))[:, 0]
        found += (selected - values.logsumexp(-1)).tolist()
    return found


def _generation_config(**options: object) -> object:
    make: Any = transformers.GenerationConfig  # untyped
    return make(**options)


def _device() -> str:
    for kind in ("cuda", "npu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            return kind
    return "cpu"
