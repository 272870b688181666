"""A tokenizer of single characters, built here, so that nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# verl's handling of Qwen's turns asks for these two names and for a newline that is one token.
PAD: Final = "<|endoftext|>"
END: Final = "<|im_end|>"
"""The model's own end of a turn."""
NEWLINE: Final = "Ċ"
"""How a byte-level vocabulary writes a newline."""
TOKENS: Final = (PAD, END, NEWLINE, *"0123456789", *"+=[]?")

_CHAT: Final = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer in the form that `AutoTokenizer` reads."""
    # Byte-level and without merges: Qwen2's own tokenizer class, which transformers may choose for
    # a Qwen2 model, reads the same vocabulary to the same effect.
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token="?"
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)
