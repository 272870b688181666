"""Whether a model takes images, by its own configuration, and whether its engine lets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stagescope.engines.base import EngineInfo

_VISION_PARTS: Final = (
    "vision_config", "vision_tower_config", "visual", "vision_encoder", "vision_model",
    "mm_vision_tower", "vision_tower", "vit_config",
)  # fmt: skip
_OFF_BY_DEFAULT: Final = (
    "Gemma3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Step3VLForConditionalGeneration",
)
"""Whose images SGLang leaves out unless it is started with `--enable-multimodal`."""


def vision_part(config: Mapping[str, Any]) -> str | None:
    """Return the part of a model's config.json that sees images; None where there is none."""
    for name in _VISION_PARTS:
        if config.get(name):
            return name
    return None


def multimodal_warning(info: EngineInfo, config: Mapping[str, Any]) -> str | None:
    """Return what to say where an engine holds a model that sees images and takes none.

    Args:
        info: the engine.
        config: the model's config.json, as a mapping.
    """
    part = vision_part(config)
    if part is None or info.multimodal:
        return None
    architectures = config.get("architectures")
    names = info.architectures or tuple(
        map(str, architectures if isinstance(architectures, list) else ())
    )
    model = names[0] if names else str(config.get("model_type") or "the model")
    if info.multimodal is False:
        how = "; start SGLang with --enable-multimodal" if info.kind == "sglang" else ""
        return f"{model} has a {part}, and {info.kind} at {info.place} takes no images{how}"
    if info.kind == "sglang":
        default = " (its default for this model)" if model in _OFF_BY_DEFAULT else ""
        return (
            f"{model} has a {part}, and SGLang at {info.place} does not say that multimodal is "
            f"on{default}; start it with --enable-multimodal where images matter"
        )
    return None
