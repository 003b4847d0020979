"""A sample of the cases over TCP and TLS, under both loops: what memory tests cannot see is closing and ALPN."""

from __future__ import annotations

import ssl

import pytest

from evap.config import ServerConfig
from evap.protocol import headers as code
from evap.protocol.tls import server_context
from tests.conformance.cases import case
from tests.protocol import frames as f
from tests.protocol.joined import split
from tests.protocol.serving import LOOPS, App, Wire, run, serving

both = pytest.mark.parametrize("loop", LOOPS)


def goaway(wire: bytes) -> int | None:
    return next((int.from_bytes(o.payload[4:8]) for o in split(wire) if o.type == f.GOAWAY), None)


@case(2, "RFC 9113 3.4")
@both
def test_a_slow_preface(loop: str) -> None:
    async def test() -> None:
        async with serving(App()) as (_, port):
            wire = await Wire.connect(port)
            for octet in f.hello() + f.get(1):
                wire.send(bytes((octet,)))
                await wire.writer.drain()
            await wire.read_until(b"hello")
            await wire.close()

    run(loop, test)


@case(4, "RFC 9113 3.4")
@both
@pytest.mark.parametrize("sent", [b"", b"PRI", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_a_silent_client_is_closed(loop: str, sent: bytes) -> None:
    async def test() -> None:
        async with serving(App(), preface_timeout_s=0.05, settings_timeout_s=0.05) as (hub, port):
            wire = await Wire.connect(port)
            wire.send(sent)
            await wire.rest()
            await wire.close()
            assert hub.shared.requests == 0

    run(loop, test)


@case(5, "RFC 9113 4.2")
@case(16, "CVE-2023-44487")
@case(20, "CVE-2024-27316")
@case(23, "CVE-2019-9512")
@both
@pytest.mark.parametrize(
    ("flood", "error"),
    [
        (f.frame(f.DATA, 0, 1, b"", length=1 << 20), code.FRAME_SIZE_ERROR),
        (b"".join(f.get(sid) + f.rst(sid) for sid in range(1, 2001, 2)), code.ENHANCE_YOUR_CALM),
        (f.headers(1, flags=0) + f.frame(f.CONTINUATION, 0, 1, b"") * 1000, code.ENHANCE_YOUR_CALM),
        (f.ping() * 10_000, code.ENHANCE_YOUR_CALM),
    ],
    ids=["frame size", "rapid reset", "continuation", "ping"],
)
def test_floods_get_goaway_and_then_the_end(loop: str, flood: bytes, error: int) -> None:
    async def test() -> None:
        async with serving(App()) as (hub, port):
            wire = await Wire.connect(port)
            wire.send(f.hello(), flood)
            assert goaway(await wire.rest()) == error
            await wire.close()
            assert hub.shared.counts["violations"] == 1

    run(loop, test)


@case(28, "RFC 9113 6.8")
@both
def test_goaway_then_half_an_answer_to_come(loop: str) -> None:
    async def test() -> None:
        app = App()
        async with serving(app) as (_, port):
            wire = await Wire.connect(port)
            wire.send(f.hello(), f.headers(1, [*f.GET[:3], (b":path", b"/stream")], end=True))
            await wire.read_until(b"text/event-stream")
            wire.send(f.goaway())
            app.streams[0].send(b"first")
            await wire.read_until(b"first")
            app.streams[0].send(b"last")
            app.streams[0].end()
            assert b"last" in await wire.rest()
            assert goaway(wire.got) == code.NO_ERROR
            await wire.close()

    run(loop, test)


@case(37, "RFC 9110 15.5.14")
@both
def test_413_reaches_a_client_that_is_still_sending(loop: str) -> None:
    async def test() -> None:
        async with serving(App(), max_body_bytes=100_000) as (_, port):
            wire = await Wire.connect(port)
            wire.send(f.hello(), f.headers(1), *[f.data(1, bytes(16_000)) for _ in range(40)])
            await wire.read_until(b"body_too_large")
            wire.send(f.get(3))
            await wire.read_until(b"hello")
            await wire.close()

    run(loop, test)


@pytest.fixture(scope="module")
def context() -> ssl.SSLContext:
    return server_context(ServerConfig(tls="self-signed"))


def client(*alpn: str) -> ssl.SSLContext:
    its = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    its.check_hostname = False
    its.verify_mode = ssl.CERT_NONE
    if alpn:
        its.set_alpn_protocols(list(alpn))
    return its


@case(59, "RFC 9113 3.2", "RFC 9113 3.3")
@both
@pytest.mark.parametrize("alpn", [(), ("http/1.1",)])
def test_without_alpn_h2_it_is_http_1(loop: str, alpn: tuple[str, ...], context: ssl.SSLContext) -> None:
    async def test() -> None:
        async with serving(App(), context) as (_, port):
            wire = await Wire.connect(port, client(*alpn))
            wire.send(b"GET /x HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
            assert (await wire.rest()).startswith(b"HTTP/1.1 200 ")
            await wire.close()
            wire = await Wire.connect(port, client(*alpn))
            wire.send(f.hello(), f.get(1))
            assert (await wire.rest())[:12] in (b"HTTP/1.1 505", b"HTTP/1.1 400")
            await wire.close()

    run(loop, test)


@case(59, "RFC 9113 3.2")
@both
def test_alpn_h2_speaks_first(loop: str, context: ssl.SSLContext) -> None:
    async def test() -> None:
        async with serving(App(), context) as (_, port):
            wire = await Wire.connect(port, client("h2", "http/1.1"))
            assert wire.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
            await wire.read_until(b"\x04\x00\x00\x00\x00\x00")  # SETTINGS, before we have said anything
            wire.send(f.hello(), f.post(1, b"over tls"))
            await wire.read_until(b"over tls")
            await wire.close()

    run(loop, test)


@case(60, "RFC 9113 9.2", "RFC 9113 9.2.2")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_tls_and_bad_suites_are_refused(context: ssl.SSLContext) -> None:
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_COMPRESSION
    assert context.options & ssl.OP_NO_RENEGOTIATION
    for suite in context.get_ciphers():
        assert suite["aead"], suite["name"]
        assert "DHE" in suite["name"] or suite["protocol"] == "TLSv1.3"

    async def test() -> None:
        async with serving(App(), context) as (hub, port):
            for change in ({"maximum_version": ssl.TLSVersion.TLSv1_1}, {"ciphers": "AES256-SHA"}):
                its = client("h2")
                if "ciphers" in change:
                    its.maximum_version = ssl.TLSVersion.TLSv1_2
                    its.set_ciphers("AES256-SHA")
                else:
                    its.minimum_version = ssl.TLSVersion.TLSv1
                    its.maximum_version = ssl.TLSVersion.TLSv1_1
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await Wire.connect(port, its)
            assert hub.shared.requests == 0

    run("asyncio", test)
