from __future__ import annotations

import json

import pytest

from stagescope_wire.engines import EngineInfo, multimodal_warning, vision_part
from stagescope_wire.nonfinite import Json

TEXT = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vision_config": None}
GEMMA = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 8}}
OWN = {"architectures": ["SomethingNew"], "mm_vision_tower": "clip"}


def sglang(**fields: Json) -> EngineInfo:
    return EngineInfo("sglang", "http://h:1", **fields)


def test_the_configuration_decides_and_not_the_name() -> None:
    assert vision_part(TEXT) is None
    assert vision_part({"architectures": ["Gemma3ForCausalLM"]}) is None
    assert vision_part(GEMMA) == "vision_config"
    assert vision_part(OWN) == "mm_vision_tower"


@pytest.mark.parametrize("config", [GEMMA, OWN])
def test_disabled_images_give_a_warning(config: dict[str, Json]) -> None:
    warning = multimodal_warning(sglang(multimodal=False), config)
    assert warning is not None
    assert "--enable-multimodal" in warning
    assert config["architectures"][0] in warning


def test_unknown_is_warned_about_with_sglang_s_default() -> None:
    warning = multimodal_warning(sglang(), GEMMA)
    assert warning is not None
    assert "its default for this model" in warning
    assert "its default" not in (multimodal_warning(sglang(), OWN) or "")


def test_no_warning_without_a_problem() -> None:
    assert multimodal_warning(sglang(multimodal=True), GEMMA) is None
    assert multimodal_warning(sglang(multimodal=False), TEXT) is None
    assert multimodal_warning(EngineInfo("vllm", "http://h:1"), GEMMA) is None


@pytest.mark.parametrize("family", ["Gemma3Config", "Llama4Config", "Qwen2VLConfig"])
def test_real_configurations(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = json.loads(getattr(transformers, family)().to_json_string(use_diff=False))
    assert vision_part(config) == "vision_config"
    text = json.loads(transformers.Qwen2Config().to_json_string(use_diff=False))
    assert vision_part(text) is None
