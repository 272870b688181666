"""Which engines exist: detects what answers at a URL, and describes registered engines.

AReaL's launcher prints `AREAL_LLM_SERVER_ADDRS=HOST:PORT[,HOST:PORT]` into its log, and its
programs read that variable.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from stagescope_wire.discovery import load_httpx
from stagescope_wire.engines.base import EngineInfo
from stagescope_wire.engines.http import EngineHttp, engine_key, engine_url
from stagescope_wire.engines.openai import LlamaCppEngine, OpenAIEngine, SGLangEngine
from stagescope_wire.errors import EngineError, InvalidInput, NotFound
from stagescope_wire.names import normal_run_name
from stagescope_wire.nonfinite import Json, JsonObject

load_httpx()
import httpx  # noqa: E402 - without its command line, which imports rich

AREAL_VARIABLE: Final = "AREAL_LLM_SERVER_ADDRS"
ENGINE_FIELDS: Final[Mapping[str, str]] = {
    "url": "http://HOST:PORT; without a query or a password",
    "name": "1 to 100 of A-Z a-z 0-9 . _ - (default: host and port)",
    "kind": "vllm, sglang, llama.cpp, openai",
    "model": "what it serves",
    "version": "of the engine",
    "run": "which run uses it",
    "note": "anything that people should know of it",
    "settings": "what it said of itself: an object",
}
"""The fields of a registration; only `url` is required."""
_MAX_LOG: Final = 64 << 20
_TEXT: Final = 500
_MAX_SETTINGS: Final = 50
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_ADDRESSES: Final = re.compile(rf"{AREAL_VARIABLE}=[\"']?([A-Za-z0-9._:\[\],-]+)")
HttpEngine = OpenAIEngine | SGLangEngine | LlamaCppEngine
"""An engine that answers over HTTP; each also has `chat`."""

_ENGINES: Final[Mapping[str, Callable[[EngineHttp, EngineInfo], HttpEngine]]] = {
    "sglang": SGLangEngine,
    "llama.cpp": LlamaCppEngine,
}
_DETECTION_TIMEOUT: Final = 10.0
HEALTH_PATH: Final = "/health"
_OWNERS: Final[Mapping[str, str]] = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_SGLANG_SETTINGS: Final = (
    "enable_multimodal", "tp_size", "dp_size", "dtype", "quantization", "kv_cache_dtype",
    "attention_backend", "random_seed", "disable_radix_cache", "enable_deterministic_inference",
)  # fmt: skip


def connect(url: str, *, key_file: str | Path | None = None, timeout: float = 120.0) -> HttpEngine:
    """Return the engine at `url`; the detected kind of server selects its class.

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
    each = [one for one in models if isinstance(one, Mapping)] if isinstance(models, list) else []
    model: JsonObject = each[0] if each else {}
    kind = _OWNERS.get(str(model.get("owned_by"))) or _other_kind(http, seconds, bool(model))
    if kind is None:
        raise EngineError(
            f"the server at {http.url} is not a known inference engine",
            expected="/v1/models (OpenAI's shape: vLLM, llama.cpp) or /model_info (SGLang)",
        )
    adapters = _texts([one.get("id") for one in each if one.get("parent")])
    return dataclasses.replace(_DESCRIBE[kind](http, model, seconds), adapters=adapters)


def _other_kind(http: EngineHttp, seconds: float, has_models: bool) -> str | None:
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
    weights = _first_object(http, seconds, "/weight_info") or {}
    return EngineInfo(
        kind="vllm",
        place=http.url,
        model=_text(model.get("id")),
        model_path=_text(model.get("root")),
        version=_text(fields.get("version")),
        processed=None,  # --logprobs-mode is not exposed; `is_processed` measures it
        scores=True,
        max_length=_int(model.get("max_model_len")),
        weight_version=_text(weights.get("weight_version")),
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


def check_engine(fields: JsonObject) -> dict[str, Json]:
    """Return a registration as it is stored: a canonical URL, a name, texts or None.

    Raises:
        InvalidInput: an unknown field, or an invalid value.
    """
    unknown = sorted(set(fields) - set(ENGINE_FIELDS))
    if unknown:
        raise InvalidInput(
            f"there is no field {', '.join(map(repr, unknown))[:200]}",
            expected=f"some of {', '.join(ENGINE_FIELDS)}",
        )
    if not isinstance(fields.get("url"), str):
        raise InvalidInput("url is not given", expected=ENGINE_FIELDS["url"])
    url = engine_url(fields["url"])
    found: dict[str, Json] = {"url": url}
    for field in ("kind", "model", "version", "run", "note"):
        value = fields.get(field)
        if value is not None and not (isinstance(value, str) and len(value) <= _TEXT):
            raise InvalidInput(f"{field} is {value!r:.100}", expected=f"a text up to {_TEXT}")
        found[field] = value or None
    if found["run"] is not None:
        found["run"] = normal_run_name(found["run"])
    name = fields.get("name")
    found["name"] = engine_name(url) if name is None else check_name(name)
    settings = fields.get("settings")
    is_small = isinstance(settings, Mapping) and len(settings) <= _MAX_SETTINGS
    if settings is not None and not is_small:
        text = "settings is not a small object"
        raise InvalidInput(text, expected=f"up to {_MAX_SETTINGS} fields")
    found["settings"] = None if not settings else dict(settings)
    return found


def check_name(name: object) -> str:
    """Return `name` if it is a valid name of an engine.

    Raises:
        InvalidInput: it is not.
    """
    if isinstance(name, str) and _NAME.match(name) and name not in {".", ".."}:
        return name
    raise InvalidInput(f"engine name {name!r:.100} is not valid", expected=ENGINE_FIELDS["name"])


def engine_name(url: str) -> str:
    """Return the default name of an engine: its host and port."""
    parsed = httpx.URL(url)
    text = f"{parsed.host}-{parsed.port or {'http': 80}.get(parsed.scheme, 443)}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:100]


_OTHER_FIELDS: Final = frozenset(
    {"kind", "place", "model", "version", "settings", "adapters", "architectures"}
)


def registration(info: EngineInfo) -> dict[str, Json]:
    """Return the fields of a registration from an engine's description."""
    fields = {
        field.name: getattr(info, field.name)
        for field in dataclasses.fields(info)
        if field.name not in _OTHER_FIELDS
    }
    known = {name: value for name, value in fields.items() if value is not None}
    return {
        "url": info.place,
        "kind": info.kind,
        "model": info.model,
        "version": info.version,
        "settings": {
            **known,
            **info.settings,
            "adapters": list(info.adapters),
            "architectures": list(info.architectures),
        },
    }


def addresses_in(text: str) -> list[str]:
    """Return the URLs in the last `AREAL_LLM_SERVER_ADDRS=` of a log."""
    found = _ADDRESSES.findall(text)
    return _urls(found[-1]) if found else []


def addresses_in_log(path: Path) -> list[str]:
    """Return the engines' URLs that a launcher printed into its log.

    Raises:
        InvalidInput: the log cannot be read.
        NotFound: it contains none (yet).
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _MAX_LOG))
            text = file.read(_MAX_LOG).decode("utf-8", "replace")
    except OSError as error:
        raise InvalidInput(f"{str(path)!r} cannot be read ({error.strerror})") from error
    found = addresses_in(text)
    if not found:
        raise NotFound(
            f"{str(path)!r} has no line {AREAL_VARIABLE}=HOST:PORT",
            advice="the launcher prints it once its servers are up",
        )
    return found


def addresses_in_environment() -> list[str]:
    """Return the engines' URLs in `AREAL_LLM_SERVER_ADDRS`.

    Raises:
        NotFound: it is not set.
    """
    found = _urls(os.environ.get(AREAL_VARIABLE, ""))
    if not found:
        raise NotFound(
            f"no engine is named: no URL was given, and {AREAL_VARIABLE} is not set",
            expected=f"a URL, --from-log FILE, or {AREAL_VARIABLE}=HOST:PORT[,HOST:PORT]",
        )
    return found


def _urls(text: str) -> list[str]:
    return [engine_url(word) for part in text.split(",") if (word := part.strip(" '\""))]
