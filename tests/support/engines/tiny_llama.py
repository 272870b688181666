"""A small random Llama and its tokenizer, made from a configuration: for transformers and as GGUF.

Its vocabulary is ASCII alone, so that whatever it samples is whole characters.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGUFWriter

BOS: Final = 0
EOS: Final = 1
_MERGES: Final = (("Ġ", "t"), ("h", "e"), ("Ġt", "he"))
_CONFIG: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_llama(folder: Path, seed: int = 0, *, template: bool = True) -> Path:
    """Write a model directory as transformers has it; return it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    if template:
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config: Any = LlamaConfig(vocab_size=len(tokenizer), **_CONFIG)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_tokenizer() -> Any:
    """Return the tokenizer; `<s>` is added in front of every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = [c for c in string.printable if c.isprintable() and c != " "]
    words = ["<s>", "</s>", *letters, "Ġ", "Ċ", *("".join(pair) for pair in _MERGES)]
    vocabulary = {word: index for index, word in enumerate(words)}
    own: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[*_MERGES]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    own.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=own, bos_token="<s>", eos_token="</s>")


def write_gguf(folder: Path, path: Path) -> Path:
    """Write the model of a directory that `write_llama` made as GGUF in float32; return it."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, folder)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, array in load_file(folder / "model.safetensors").items():
        own = _gguf_name(name)
        kind = own.rsplit(".", 2)[-2]
        writer.add_tensor(own, _interleaved(array, heads[kind]) if kind in heads else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    control, normal = 3, 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([control, control] + [normal] * (len(words) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)


_PARTS: Final = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def _gguf_name(name: str) -> str:
    base = name.removesuffix(".weight").removeprefix("model.")
    if not base.startswith("layers."):
        return f"{_PARTS[base]}.weight"
    _, index, part = base.split(".", 2)
    return f"blk.{index}.{_PARTS[part]}.weight"


def _interleaved(array: npt.NDArray[np.generic], heads: int) -> npt.NDArray[np.generic]:
    """Return rows in the order in which GGUF's Llama rotates them: pairs beside each other."""
    rows = array.shape[0] // heads // 2
    parts = array.reshape(heads, 2, rows, array.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(parts.reshape(array.shape))
