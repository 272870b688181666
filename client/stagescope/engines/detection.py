"""Detect which engine answers at a URL, and read its description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from stagescope.engines.base import EngineInfo
from stagescope.engines.http import EngineHttp, engine_key
from stagescope.engines.llama_cpp import LlamaCppEngine
from stagescope.engines.openai import OpenAIEngine
from stagescope.engines.sglang import SGLangEngine
from stagescope.wire.errors import EngineError
from stagescope.wire.nonfinite import JsonObject

HttpEngine = OpenAIEngine | SGLangEngine | LlamaCppEngine
"""An engine that answers over HTTP; each also has `chat`."""

_ENGINES: Final[Mapping[str, Callable[[EngineHttp, EngineInfo], HttpEngine]]] = {
    "sglang": SGLangEngine,
    "llama.cpp": LlamaCppEngine,
}
_DETECTION_TIMEOUT: Final = 10.0
HEALTH_PATH: Final = "/health"
_OWNERS: Final[Mapping[str, str]] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama.cpp",
}
_SGLANG_SETTINGS: Final = (
    "enable_multimodal", "tp_size", "dp_size", "dtype", "quantization", "kv_cache_dtype",
    "attention_backend", "random_seed", "disable_radix_cache", "enable_deterministic_inference",
)  # fmt: skip


def connect(url: str, *, key_file: str | Path | None = None, timeout: float = 120.0) -> HttpEngine:
    """Return the engine at `url`; its class is that of the detected kind of server.

    Args:
        url: `http://HOST:PORT`, or HOST:PORT.
        key_file: file with the server's key; else STAGESCOPE_ENGINE_KEY_FILE, else
            STAGESCOPE_ENGINE_KEY. It is sent to this server alone.
        timeout: deadline of each call, seconds.

    Raises:
        EngineError: nothing answers there, or the server is not a known inference engine.
        InvalidInput: not an http or https URL.
    """
    http = EngineHttp(url, key=engine_key(key_file), timeout=timeout)
    try:
        info = detect(http)
    except BaseException:
        http.close()
        raise
    return _ENGINES.get(info.kind, OpenAIEngine)(http, info)


def detect(http: EngineHttp) -> EngineInfo:
    """Return the description of the server's engine.

    Raises:
        EngineError: nothing answers, or the server is not a known inference engine.
    """
    seconds = min(_DETECTION_TIMEOUT, http.timeout)
    listed = http.get("/v1/models", timeout=seconds)
    models = listed.get("data") if isinstance(listed, Mapping) else None
    first = models[0] if isinstance(models, list) and models else {}
    model: JsonObject = first if isinstance(first, Mapping) else {}
    kind = _OWNERS.get(str(model.get("owned_by"))) or _other_kind(http, seconds, bool(model))
    if kind is None:
        raise EngineError(
            f"what answers at {http.url} is no inference engine that is known",
            expected="/v1/models (OpenAI's shape: vLLM, llama.cpp) or /model_info (SGLang)",
        )
    return _DESCRIBE[kind](http, model, seconds)


def _other_kind(http: EngineHttp, seconds: float, has_models: bool) -> str | None:
    """Return the kind of a server whose list of models does not name it; None if unknown."""
    if _sglang_info(http, seconds) is not None:
        return "sglang"
    return "openai" if has_models else None


def _sglang_info(http: EngineHttp, seconds: float) -> JsonObject | None:
    fields = _first_object(http, seconds, "/model_info", "/get_model_info")
    return fields if fields is not None and "model_path" in fields else None


def _first_object(http: EngineHttp, seconds: float, *paths: str) -> JsonObject | None:
    """Return the first JSON object that one of `paths` answers; SGLang has renamed its routes."""
    for path in paths:
        try:
            fields = http.get(path, timeout=seconds)
        except EngineError:  # another kind of server answers this path with something else
            continue
        if isinstance(fields, Mapping):
            return fields
    return None


def _describe_sglang(http: EngineHttp, model: JsonObject, seconds: float) -> EngineInfo:
    info = _sglang_info(http, seconds) or {}
    server = _first_object(http, seconds, "/server_info", "/get_server_info") or {}
    images = info.get("has_image_understanding")
    if not isinstance(images, bool):  # older SGLang: its setting, None for the default
        images = server.get("enable_multimodal")
    version = info.get("weight_version")
    return EngineInfo(
        kind="sglang",
        place=http.url,
        model=_text(info.get("served_model_name") or model.get("id") or info.get("model_path")),
        model_path=_text(info.get("model_path")),
        version=_text(server.get("version")),
        dtype=_text(server.get("dtype")),
        quantisation=_text(server.get("quantization")),
        # Output log-probs are after temperature; SGLANG_RETURN_ORIGINAL_LOGPROB is not exposed.
        processed=True,
        multimodal=images if isinstance(images, bool) else None,
        scores=True,
        max_length=_int(model.get("max_model_len") or server.get("max_total_num_tokens")),
        architectures=_texts(info.get("architectures")),
        weight_version=None if version is None else str(version),
        settings={name: server[name] for name in _SGLANG_SETTINGS if name in server},
    )


def _describe_vllm(http: EngineHttp, model: JsonObject, seconds: float) -> EngineInfo:
    fields = _first_object(http, seconds, "/version") or {}
    return EngineInfo(
        kind="vllm",
        place=http.url,
        model=_text(model.get("id")),
        model_path=_text(model.get("root")),
        version=_text(fields.get("version")),
        processed=False,  # raw_logprobs, its default; --logprobs-mode is not exposed
        scores=True,
        max_length=_int(model.get("max_model_len")),
    )


def _describe_llama_cpp(http: EngineHttp, model: JsonObject, seconds: float) -> EngineInfo:
    fields = _first_object(http, seconds, "/props") or {}
    meta = model.get("meta") if isinstance(model.get("meta"), Mapping) else {}
    assert isinstance(meta, Mapping)
    modalities = fields.get("modalities")
    images = modalities.get("vision") if isinstance(modalities, Mapping) else None
    return EngineInfo(
        kind="llama.cpp",
        place=http.url,
        model=_text(model.get("id")),
        model_path=_text(fields.get("model_path")),
        version=_text(fields.get("build_info")),
        quantisation=_text(meta.get("ftype")),
        processed=False,
        multimodal=images if isinstance(images, bool) else None,
        scores=False,  # llama.cpp has neither echo nor log-probs of a prompt
        max_length=_int(meta.get("n_ctx")),
    )


def _describe_other(http: EngineHttp, model: JsonObject, seconds: float) -> EngineInfo:
    return EngineInfo(
        kind="openai",
        place=http.url,
        model=_text(model.get("id")),
        max_length=_int(model.get("max_model_len")),
    )


_DESCRIBE: Final[
    Mapping[str, Callable[[EngineHttp, JsonObject, float], EngineInfo]]
] = {
    "sglang": _describe_sglang,
    "vllm": _describe_vllm,
    "llama.cpp": _describe_llama_cpp,
    "openai": _describe_other,
}  # fmt: skip


def _text(value: object) -> str | None:
    return value[:500] if isinstance(value, str) and value else None


def _texts(value: object) -> tuple[str, ...]:
    return tuple(map(str, value[:10])) if isinstance(value, list) else ()


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
