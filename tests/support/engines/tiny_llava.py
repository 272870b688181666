"""A small random LLaVA, made from a configuration: a model that takes images, and its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from tests.support.engines.tiny_llama import BOS, EOS, tiny_tokenizer

IMAGE: Final = "<image>"
TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: "
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_llava(folder: Path, seed: int = 0) -> Path:
    """Write a model directory as transformers has it; return it."""
    import torch
    import transformers

    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    vision: Any = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        image_size=28, patch_size=14, projection_dim=32,
    )  # fmt: skip
    text: Any = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=256, bos_token_id=BOS, eos_token_id=EOS,
        initializer_range=0.2,
    )  # fmt: skip
    config: Any = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=4,
    )
    torch.manual_seed(seed)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    make: Any = transformers.CLIPImageProcessor
    images = make(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor: Any = transformers.LlavaProcessor
    processor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default",
        image_token=IMAGE, num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip
    return folder
