"""Small random Qwen2 and Qwen3-MoE models, variants of their weights, and LoRA adapters.

They are made from configurations, with a fixed seed. The next-token distributions have an entropy
of about 3.4 nats of 6.2, so a temperature matters and log-probs have a spread.
"""

from __future__ import annotations

import json
import shutil
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["dense", "moe"]
VOCABULARY: Final = 512
BOS: Final = 0
EOS: Final = 1
MAX_LENGTH: Final = 512
LORA_RANK: Final = 8
_LORA_ALPHA: Final = 16
_LORA_MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_SPREAD: Final = {"lm_head": 0.15, "embed_tokens": 0.5, "bias": 0.1, "norm": 0.0}
_SPREAD_ELSE: Final = 0.08
_WEIGHTS: Final = "model.safetensors"
_CONFIG: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_EXPERTS: Final[dict[str, Any]] = {
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write_qwen(folder: Path, kind: Kind = "dense", *, seed: int = 0) -> Path:
    """Write a model directory with a tokenizer that adds no BOS; return it.

    The weights are stored as float32 and rounded to bfloat16: engines in either have the same.

    Args:
        folder: where to write.
        kind: "dense" (Qwen2) or "moe" (Qwen3-MoE, 8 experts, 2 per token).
        seed: of the weights.
    """
    import torch
    import transformers

    generator = torch.Generator().manual_seed(seed)
    if kind == "dense":
        model: Any = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_CONFIG))
    else:
        config = transformers.Qwen3MoeConfig(**_CONFIG, **_EXPERTS)
        model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            part = next((each for each in _SPREAD if each in name), "")
            spread = _SPREAD.get(part, _SPREAD_ELSE)
            if spread:
                value.copy_(torch.randn(value.shape, generator=generator) * spread)
    model.to(torch.bfloat16).float().save_pretrained(folder)
    # Default sampling parameters of vLLM would come from here.
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder, bos=False)
    return folder


def write_tokenizer(folder: Path, *, bos: bool) -> Path:
    """Write a tokenizer, one token a character, to a directory; return it.

    Args:
        folder: where to write.
        bos: whether it adds `<s>` in front of every text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [c for c in string.printable if c.isprintable() and c != " "]
    words = ["<s>", "</s>", *letters, "Ġ", "Ċ"]
    words += [f"w{index}" for index in range(len(words), VOCABULARY)]
    vocabulary = {word: index for index, word in enumerate(words)}
    own: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    if bos:
        own.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    own.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=own, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def write_variant(
    source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> Path:
    """Copy a model directory and change its weights; return the copy.

    Args:
        source: a model directory.
        folder: the copy.
        change: receives name -> tensor and changes it in place.
    """
    from safetensors.torch import save_file

    shutil.copytree(source, folder, dirs_exist_ok=True)
    weights = read_weights(source)
    change(weights)
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    return folder


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return name -> tensor of a model directory."""
    from safetensors.torch import load_file

    return load_file(folder / _WEIGHTS)


def scaled(factors: Mapping[str, float]) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change that multiplies the tensors whose name contains a key by its factor.

    `scaled({"layers.1.mlp.experts.3.": 1.05})` scales one expert.
    """

    def change(weights: dict[str, torch.Tensor]) -> None:
        for part, factor in factors.items():
            names = [name for name in weights if part in name]
            assert names, f"no tensor has {part} in its name: {sorted(weights)}"
            for name in names:
                weights[name] = weights[name] * factor

    return change


def trained(
    seed: int = 1, size: float = 0.1, *, without: str | None = None
) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change that moves every matrix as an update would.

    Args:
        seed: of the update.
        size: standard deviation of the update, relative to the tensor's own.
        without: tensors with this in their name stay as they were (one that was not synced).
    """
    import torch

    def change(weights: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(seed)
        kept = [name for name in weights if without is not None and without in name]
        assert kept or without is None, f"no tensor has {without} in its name: {sorted(weights)}"
        for name, value in sorted(weights.items()):
            noise = torch.randn(value.shape, generator=generator)
            if value.ndim == 2 and name not in kept:
                moved = value.float() + size * value.float().std() * noise
                weights[name] = moved.to(torch.bfloat16).to(value.dtype)

    return change


def write_adapter(model: Path, folder: Path, *, seed: int = 2, size: float = 0.02) -> Path:
    """Write a LoRA adapter of the attention's projections as PEFT does; return its directory.

    Args:
        model: the base model's directory.
        folder: where to write.
        seed: of its weights.
        size: standard deviation of B, which is 0 in an adapter that is not trained yet.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, value in sorted(read_weights(model).items()):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.endswith(_LORA_MODULES):
            rows, columns = value.shape
            a = torch.randn((LORA_RANK, columns), generator=generator) / columns**0.5
            b = torch.randn((rows, LORA_RANK), generator=generator) * size
            for part, matrix in (("lora_A", a), ("lora_B", b)):
                key = f"base_model.model.{module}.{part}.weight"
                adapter[key] = matrix.to(torch.bfloat16).to(value.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": LORA_RANK,
        "lora_alpha": _LORA_ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_LORA_MODULES),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(adapter: Path) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change that adds an adapter to the base: the trainer's weights."""
    from safetensors.torch import load_file

    parts = load_file(adapter / "adapter_model.safetensors")

    def change(weights: dict[str, torch.Tensor]) -> None:
        for key in parts:
            if ".lora_A." in key:
                a, b = parts[key].float(), parts[key.replace(".lora_A.", ".lora_B.")].float()
                name = key.removeprefix("base_model.model.").replace(".lora_A", "")
                added = weights[name].float() + _LORA_ALPHA / LORA_RANK * (b @ a)
                weights[name] = added.to(weights[name].dtype)

    return change
