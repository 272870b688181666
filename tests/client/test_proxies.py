"""The way to the service and to engines in environments that name a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.support.answering import READ, Answering, serving, unused_port
from tests.support.engines.servers import EngineServer
from tests.support.proxy import Proxy, running_proxy, set_proxy

import stagescope
from stagescope_wire import proxies
from stagescope_wire.engines.http import EngineHttp
from stagescope_wire.errors import EngineError, InvalidInput, Unreachable

BEYOND = "127.0.0.2"
"""Of this machine, and not one of the names that are known as loopback."""


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with running_proxy() as proxy:
        yield proxy


@pytest.fixture
def url() -> Iterator[str]:
    """A service on another address than loopback's."""
    with serving(Answering().app, host=BEYOND) as url:
        yield url


@pytest.mark.parametrize("no_proxy", ["", "127.0.0.0/8", BEYOND, "*"])
def test_the_token_goes_to_no_proxy_of_the_environment(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, no_proxy: str
) -> None:
    set_proxy(monkeypatch, proxy, no_proxy)
    with stagescope.attach(url, token=READ, timeout=5.0) as session:
        assert len(session.runs()) == 2
    assert proxy.tokens == []


def test_a_proxy_that_is_asked_for_is_used_but_not_for_loopback(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(proxies.VARIABLE, proxy.url)
    proxy.status = None
    with stagescope.attach(url, token=READ, timeout=5.0) as session:
        assert len(session.runs()) == 2
    assert set(proxy.tokens) == {f"Bearer {READ}"}
    proxy.tokens.clear()
    with (
        serving(Answering().app) as local,
        stagescope.attach(local, token=READ, timeout=5.0) as session,
    ):
        assert len(session.runs()) == 2
    assert proxy.tokens == []


@pytest.mark.parametrize("status", [302, 400, 401, 403, 404, 407, 429, 502, 503])
def test_an_answer_of_the_proxy_is_named_as_such(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv(proxies.VARIABLE, proxy.url.replace("//", "//user:secret@"))
    proxy.status = status
    with pytest.raises(Unreachable) as caught:
        stagescope.attach(url, token=READ, timeout=1.0)
    text = str(caught.value)
    assert f"{status} " in text
    assert url in text
    assert f"through the proxy http://...@{proxy.url[7:]} (STAGESCOPE_PROXY)" in text
    assert "secret" not in text


def test_a_proxy_that_nobody_asked_for_is_named_by_its_headers(proxy: Proxy) -> None:
    with pytest.raises(Unreachable, match=r"from a proxy \(server: .*, via: 1.1 squid.test\)"):
        stagescope.attach(proxy.url, token=READ, timeout=1.0)


@pytest.mark.parametrize("url", ["http://{}:{}", "https://{}:{}"])
def test_a_proxy_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(proxies.VARIABLE, f"http://127.0.0.1:{unused_port()}")
    with pytest.raises(Unreachable, match="cannot be reached through the proxy http"):
        stagescope.attach(url.format(BEYOND, unused_port()), token=READ, timeout=1.0)


def test_an_unused_proxy_of_the_environment_is_named(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_proxy(monkeypatch, proxy)
    with pytest.raises(Unreachable, match="http_proxy is set and not used for it"):
        stagescope.attach(f"http://{BEYOND}:{unused_port()}", token=READ, timeout=1.0)


@pytest.mark.parametrize("value", ["proxy", "ftp://proxy:1", "http://", "http://proxy:x"])
def test_what_is_no_proxy_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(proxies.VARIABLE, value)
    with pytest.raises(InvalidInput, match=proxies.VARIABLE):
        stagescope.attach("http://head:8700", token=READ)


def test_an_engine_s_key_goes_to_no_proxy_unless_it_is_asked_for(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_proxy(monkeypatch, proxy, "127.0.0.0/8")
    with serving(EngineServer("vllm").app, host=BEYOND) as url:
        engine = EngineHttp(url, key="engine-key")
        assert engine.status("/health", timeout=5.0) == 200
        engine.close()
        assert proxy.tokens == []
        monkeypatch.setenv(proxies.VARIABLE, proxy.url)
        engine = EngineHttp(url, key="engine-key")
        with pytest.raises(EngineError, match="503 for /health through the proxy http"):
            engine.get("/health")
        engine.close()
    assert proxy.tokens == ["Bearer engine-key"]


@pytest.mark.parametrize(
    ("url", "proxy", "address"),
    [
        ("http://head:8700", "", ("head", 8700)),
        ("https://head/x", "", ("head", 443)),
        ("https://head/x", "http://proxy:3128", ("proxy", 3128)),
        ("http://127.0.0.1:8700", "http://proxy:3128", ("127.0.0.1", 8700)),
    ],
)
def test_the_first_address_on_the_way(
    monkeypatch: pytest.MonkeyPatch, url: str, proxy: str, address: tuple[str, int]
) -> None:
    monkeypatch.setenv(proxies.VARIABLE, proxy)
    assert proxies.first_address(url) == address


def test_the_reason_of_an_error_holds_no_credential(url: str) -> None:
    with pytest.raises(httpx.LocalProtocolError, match="hidden") as caught:
        httpx.get(url, headers={"authorization": "Bearer hidden\n"}, trust_env=False)
    assert proxies.reason_of(caught.value) == "LocalProtocolError"
    quoted = httpx.RemoteProtocolError("it echoes b'authorization: Bearer hidden' at line 2")
    assert proxies.reason_of(quoted) == "it echoes b'authorization: Bearer ...' at line 2"
    assert proxies.reason_of(httpx.ConnectError("")) == "ConnectError"
