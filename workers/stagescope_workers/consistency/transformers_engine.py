"""The model as transformers computes it, in this process: what engines are held against.

Log-probs are `log_softmax` of the float32 logits, at temperature 1 over the whole vocabulary
unless asked otherwise. Only local files are read, and of weights only safetensors.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope.engines import EngineInfo, Generation, Prompt, Sampling, vision_part
from stagescope.engines.base import check_ids, check_prompt
from stagescope.wire.errors import InvalidInput, MissingExtra, NotFound

try:
    import torch
    import transformers
except ImportError as error:
    raise MissingExtra(
        f"transformers' side needs {error.name}, which is not installed",
        advice="pip install torch transformers, or 'stagescope[example]'",
    ) from error

_POSITIONS: Final = 512
"""Positions whose logits are in float32 at one time: a vocabulary of 150 k takes 300 MB."""
_DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "float64")


class TransformersEngine:
    """A model directory, loaded.

    Args:
        path: with config.json, *.safetensors and the tokenizer's files.
        dtype: of weights and arithmetic; "auto" is the weights' own.
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
            self.config: Mapping[str, Any] = config.to_dict()
            self.sees = vision_part(self.config) is not None
            auto: Any = (
                transformers.AutoModelForImageTextToText
                if self.sees
                else transformers.AutoModelForCausalLM
            )
            own: Any = dtype if dtype == "auto" else getattr(torch, dtype)
            model = auto.from_pretrained(
                path, dtype=own, local_files_only=True, use_safetensors=True
            )
        self._path = path
        self._model: Any = model.to(device or _device()).eval()
        own = model.generation_config
        # What a call leaves open comes from here: a model's own file may cut, scale or penalise.
        model.generation_config = _generation_config(
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id if own.pad_token_id is not None else 0,
        )
        self.tokenizer = load_tokenizer(path)
        self._processor: Any = None
        self._info = EngineInfo(
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

    @property
    def info(self) -> EngineInfo:
        """What is known of it."""
        return self._info

    def close(self) -> None:
        """Let go of the model."""
        self._model = None

    def score(self, rows: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the log-prob of each given token; see `Engine.score`."""
        return self.score_at(rows, 1.0)

    def score_at(
        self, rows: Sequence[Sequence[int]], temperature: float
    ) -> list[tuple[float, ...]]:
        """Return the same after the logits were divided by `temperature`.

        For engines whose log-probs are those after it.
        """
        return [self._score(check_ids(row), temperature) for row in rows]

    def _score(self, row: list[int], temperature: float) -> tuple[float, ...]:
        # A row at a time: padding would be one more thing that may differ.
        ids = torch.tensor([row], device=self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
            found = _chosen(logits, ids[0, 1:], temperature)
        return (math.nan, *found)

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None
    ) -> list[Generation]:
        """Continue each prompt; see `Engine.generate`."""
        drawn = sampling or Sampling()
        rows = [self._ids(check_prompt(prompt)) for prompt in prompts]
        with _seeded(drawn.seed):
            return [
                self._generate({"input_ids": torch.tensor([row])}, drawn, len(row)) for row in rows
            ]

    def chat(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], sampling: Sampling | None = None
    ) -> list[Generation]:
        """Answer conversations whose parts may be `{"type": "image", "path": FILE}`.

        Raises:
            InvalidInput: the model takes no images.
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
        drawn = sampling or Sampling()
        found = []
        with _seeded(drawn.seed):
            for messages in conversations:
                inputs = self._processor.apply_chat_template(
                    list(messages), add_generation_prompt=True, tokenize=True, return_dict=True,
                    return_tensors="pt",
                )  # fmt: skip
                found.append(self._generate(inputs, drawn, inputs["input_ids"].shape[1]))
        return found

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt

    def _generate(self, inputs: Mapping[str, Any], drawn: Sampling, length: int) -> Generation:
        model = self._model
        placed = {name: value.to(model.device) for name, value in inputs.items()}
        placed.setdefault("attention_mask", torch.ones_like(placed["input_ids"]))
        config = _generation_config(
            max_new_tokens=drawn.max_tokens,
            do_sample=drawn.temperature > 0,
            temperature=drawn.temperature or None,
            top_p=drawn.top_p if drawn.temperature > 0 else None,
            top_k=drawn.top_k if drawn.temperature > 0 else None,
            stop_strings=list(drawn.stop) or None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.inference_mode():
            made = model.generate(
                **placed,
                generation_config=config,
                tokenizer=self.tokenizer if drawn.stop else None,
            )
            ids = made.sequences[0, length:]
            values = _chosen(torch.cat(made.logits)[: len(ids)], ids, 1.0)
        token_ids = tuple(ids.tolist())
        return Generation(
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            token_ids=token_ids,
            log_probs=tuple(values),
            prompt_tokens=length,
            finish_reason="length" if len(token_ids) == drawn.max_tokens else "stop",
        )


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a model directory.

    Raises:
        NotFound: there is none.
    """
    with _loading(path):
        # Untyped, and a union of many kinds.
        auto: Any = transformers.AutoTokenizer
        return auto.from_pretrained(path, local_files_only=True)


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    if not (path / "config.json").is_file():
        raise NotFound(
            f"{str(path)!r} is no model directory", expected="a directory with config.json"
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
    """Draw from `seed` inside; the process's own generators are as before afterwards."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _chosen(logits: Any, ids: Any, temperature: float) -> list[float]:
    """Return the log-softmax of `logits` [positions, vocabulary] at `ids` [positions]."""
    found: list[float] = []
    for start in range(0, len(ids), _POSITIONS):
        piece = slice(start, start + _POSITIONS)
        values = logits[piece]
        values = values if values.dtype == torch.float64 else values.float()
        if temperature != 1.0:
            values = values / temperature
        at = values.gather(-1, ids[piece, None].to(values.device))[:, 0]
        found += (at - values.logsumexp(-1)).tolist()
    return found


def _generation_config(**options: Any) -> Any:
    make: Any = transformers.GenerationConfig  # untyped
    return make(**options)


def _device() -> str:
    for kind in ("cuda", "npu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            return kind
    return "cpu"
