"""Clients of inference engines: generate with log-probs, and score given tokens.

::

    from stagescope_wire.engines import Sampling, connect

    engine = connect("http://127.0.0.1:20082")     # vLLM, SGLang, llama.cpp, OpenAI-compatible
    [answer] = engine.generate(["2 + 2 ="], Sampling(max_tokens=8, temperature=1.0, seed=1))
    answer.token_ids, answer.log_probs
    engine.score([[1, 450, 4996]])                 # log-prob of each given token
    engine.using(adapter="policy", concurrency=1)  # a LoRA adapter, one request at a time

`stagescope.engine(name)` connects to one that is registered with the service.
"""

from __future__ import annotations

from stagescope_wire.engines.base import (
    Engine,
    EngineInfo,
    Generation,
    Prompt,
    Sampling,
    is_processed,
    multimodal_warning,
    vision_part,
)
from stagescope_wire.engines.openai import LlamaCppEngine, OpenAIEngine, SGLangEngine
from stagescope_wire.engines.registry import HttpEngine, connect

__all__ = [
    "Engine",
    "EngineInfo",
    "Generation",
    "HttpEngine",
    "LlamaCppEngine",
    "OpenAIEngine",
    "Prompt",
    "SGLangEngine",
    "Sampling",
    "connect",
    "is_processed",
    "multimodal_warning",
    "vision_part",
]
