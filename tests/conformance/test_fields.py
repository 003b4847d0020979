"""Cases 40-52: header semantics and HPACK."""

from __future__ import annotations

import tracemalloc

import pytest
from hpack import Decoder, Encoder

from evap.protocol import headers as code
from evap.protocol.headers import BadHeader
from tests.conformance.cases import case
from tests.protocol import frames as f
from tests.protocol.joined import Raw

Field = tuple[bytes, bytes]


def refused(fields: f.Fields, *, end: bool = True) -> Raw:
    """The request ends its own stream, its neighbours live, and the compression context stays in step."""
    raw = Raw()
    encoder = Encoder()
    raw.send(f.get(1), f.frame(f.HEADERS, f.END_HEADERS | end, 3, encoder.encode(fields)))
    assert raw.resets(3) == [code.PROTOCOL_ERROR]
    after = encoder.encode([*f.GET, (b"x-after", b"in step")])
    raw.send(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 5, after))
    assert [r.head.get(b"x-after") for r in raw.requests()] == [None, b"in step"]
    assert raw.healthy
    return raw


@case(40, "RFC 9113 8.2.1")
@pytest.mark.parametrize(
    "field",
    [
        (b"X-Upper", b"v"), (b"", b"v"), (b"x y", b"v"), (b"x:y", b"v"), (b"x\x00", b"v"), (b"x\n", b"v"),
        (b"x\x7f", b"v"), (b"x\xc3", b"v"), (b"x", b"a\x00b"), (b"x", b"a\rb"), (b"x", b"a\nb"), (b"x", b" v"),
        (b"x", b"v "), (b"x", b"\tv"), (b"x", b"v\t"), (b"x", b"v\r\nset-cookie: a"),
    ],
)  # fmt: skip
def test_names_and_values(field: Field) -> None:
    refused([*f.GET, field])


@case(41, "RFC 9113 8.2.2")
@pytest.mark.parametrize(
    "field",
    [
        (b"connection", b"close"), (b"keep-alive", b"1"), (b"proxy-connection", b"x"),
        (b"transfer-encoding", b"chunked"), (b"upgrade", b"h2c"), (b"te", b"gzip"), (b"te", b"trailers, gzip"),
    ],
)  # fmt: skip
def test_connection_specific_fields(field: Field) -> None:
    refused([*f.GET, field])


@case(41, "RFC 9113 8.2.2")
def test_te_trailers_is_fine() -> None:
    raw = Raw()
    raw.send(f.get(1, (b"te", b"trailers")))
    assert len(raw.requests()) == 1


@case(42, "RFC 9113 8.3")
@pytest.mark.parametrize(
    "fields",
    [
        *[[p for p in f.GET if p[0] != name] for name in (b":method", b":scheme", b":path")],
        [*f.GET, (b":path", b"/two")],
        [(b"x", b"y"), *f.GET],
        [*f.GET[:2], (b"x", b"y"), *f.GET[2:]],
        [*f.GET, (b":unknown", b"x")],
        [*f.GET, (b":status", b"200")],
        [],
    ],
)
def test_pseudo_header_fields(fields: f.Fields) -> None:
    refused(fields)


@case(42, "RFC 9113 8.1", "RFC 9113 8.3")
@pytest.mark.parametrize(
    "trailers", [f.headers(1, ((b":path", b"/"),), end=True), f.headers(1, ((b"x", b"y"),)),
                 f.headers(1, ((b"Bad", b"y"),), end=True)],
    ids=["pseudo", "without END_STREAM", "bad name"],
)  # fmt: skip
def test_trailers(trailers: bytes) -> None:
    raw = Raw()
    raw.send(f.headers(1), f.data(1, b"{}"), trailers)
    assert raw.resets(1) == [code.PROTOCOL_ERROR]
    assert raw.requests() == []
    assert raw.healthy


def with_path(path: bytes, method: bytes = b"GET") -> list[Field]:
    return [(b":method", method), *f.GET[1:3], (b":path", path)]


@case(43, "RFC 9113 8.3.1", "RFC 3986 3.3")
@pytest.mark.parametrize("path", [b"", b"v1", b"/a b", b"/a\x00", b"/a#b", b"*", b"/\x7f", b"/\xff", b"http://x/"])
def test_paths(path: bytes) -> None:
    refused(with_path(path))


@case(43, "RFC 9113 8.3.1")
def test_options_star_is_fine() -> None:
    raw = Raw()
    raw.send(f.headers(1, with_path(b"*", b"OPTIONS"), end=True))
    assert raw.requests()[0].head.path == "*"


@case(44, "RFC 9110 9.1", "RFC 9113 8.3.1")
@pytest.mark.parametrize(
    "fields",
    [
        with_path(b"/", b""),
        with_path(b"/", b"GE T"),
        with_path(b"/", b"GET\xff"),
        [f.GET[0], (b":scheme", b"http"), (b":authority", b""), f.GET[3]],
        [f.GET[0], (b":scheme", b"http"), (b":authority", b"user@node"), f.GET[3]],
        [f.GET[0], (b":scheme", b"http"), (b":authority", b"a b"), f.GET[3]],
        [f.GET[0], (b":scheme", b"http"), (b":authority", b"node/path"), f.GET[3]],
    ],
)
def test_method_and_authority(fields: f.Fields) -> None:
    refused(fields)


@case(44, "RFC 9113 8.3.1")
def test_schemes() -> None:
    """https over cleartext is what a proxy that ends TLS sends; anything else is not ours."""
    raw = Raw()
    for sid, scheme in ((1, b"http"), (3, b"https"), (5, b"ftp")):
        raw.send(f.headers(sid, [f.GET[0], (b":scheme", scheme), *f.GET[2:]], end=True))
    assert [r.head.scheme for r in raw.requests()] == ["http", "https"]
    assert raw.status(5) == 400


@case(45, "RFC 9113 8.3.1")
@pytest.mark.parametrize(
    "more", [[(b"host", b"other")], [(b"host", b"node:8000"), (b"host", b"node:8000")], [(b"host", b"")]]
)
def test_host_and_authority_differ(more: list[Field]) -> None:
    refused([*f.GET, *more])


@case(45, "RFC 9110 4.2.3")
def test_host_in_another_case_is_the_same() -> None:
    raw = Raw()
    raw.send(f.get(1, (b"host", b"NODE:8000")))
    raw.send(f.headers(3, [*f.GET[:2], f.GET[3], (b"host", b"only")], end=True))
    assert [r.head.authority for r in raw.requests()] == ["node:8000", "only"]


@case(46, "RFC 9113 8.5", "RFC 8441 4")
@pytest.mark.parametrize(
    "fields",
    [
        [(b":method", b"CONNECT"), (b":authority", b"x:1")],
        [(b":method", b"CONNECT"), (b":protocol", b"websocket"), *f.GET[1:]],
    ],
)
def test_connect(fields: f.Fields) -> None:
    refused(fields, end=False)


@case(47, "RFC 9110 8.6")
@pytest.mark.parametrize("value", [b"+1", b"1, 1", b"-1", b"", b"0x1", b"1 ", b"\xb2"])
def test_content_lengths(value: bytes) -> None:
    refused([*f.POST, (b"content-length", value)], end=False)


@case(47, "RFC 9110 8.6")
def test_two_content_lengths() -> None:
    refused([*f.POST, (b"content-length", b"1"), (b"content-length", b"2")], end=False)
    raw = Raw()
    raw.send(f.headers(1, [*f.POST, (b"content-length", b"2"), (b"content-length", b"2")]), f.data(1, b"{}", end=True))
    assert len(raw.requests()) == 1


@case(47, "RFC 9110 8.6", "RFC 9110 15.5.14")
def test_a_content_length_of_5000_digits() -> None:
    raw = Raw()
    raw.send(f.headers(1, (*f.POST, (b"content-length", b"9" * 5000))))
    assert raw.status(1) == 413
    assert raw.healthy


@case(48, "RFC 6585 5", "RFC 9113 10.5.1")
@pytest.mark.parametrize(
    "more",
    [[(b"x-big-%d" % i, b"v" * 8000) for i in range(5)], [(b"a", b"")] * 150, [(b"cookie", b"a=b")] * 150],
    ids=["large", "many", "cookie crumbs"],
)
def test_header_lists_over_the_limit(more: list[Field]) -> None:
    raw = Raw()
    encoder = Encoder()
    whole = encoder.encode([*f.GET, *more])
    raw.send(f.frame(f.HEADERS, f.END_STREAM, 1, whole[:16_000]))
    raw.send(f.frame(f.CONTINUATION, 0, 1, whole[16_000:32_000]))
    raw.send(f.frame(f.CONTINUATION, f.END_HEADERS, 1, whole[32_000:]))
    assert raw.status(1) == 431
    after = encoder.encode([*f.GET, (b"x-after", b"in step")])
    raw.send(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 3, after))
    assert raw.requests()[0].head.get(b"x-after") == b"in step"
    assert raw.healthy


@case(48, "RFC 9113 10.5.1")
def test_a_list_far_over_the_limit_ends_the_connection() -> None:
    raw = Raw()
    raw.send(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, f.block(f.GET) + b"\x90" * 2000))
    assert raw.goaway == code.ENHANCE_YOUR_CALM


@case(48, "RFC 9113 8.2.3")
def test_a_few_cookie_crumbs_are_one_cookie() -> None:
    raw = Raw()
    raw.send(f.get(1, (b"cookie", b"a=1"), (b"cookie", b"b=2")))
    assert raw.requests()[0].head.get(b"cookie") == b"a=1; b=2"


@case(49, "RFC 7541 2.3.3", "RFC 7541 5.1", "RFC 7541 4.2", "RFC 7541 6.3", "RFC 9113 4.3")
@pytest.mark.parametrize(
    "block",
    [
        b"\x80", b"\xff\x80\x80\x80\x80\x80\x01", b"\xbe", b"\xff", b"\x00\x05ab", b"\x40", b"\x00\x84\xff\xff\xff\xff",
        b"\x3f\xe2\x1f" + f.block(f.GET), f.block(f.GET) + b"\x20", b"\x00\x81\xff\x01a",
    ],
    ids=["index 0", "long integer", "past the table", "cut integer", "cut string", "cut literal", "huffman EOS",
         "table update over the limit", "table update after a field", "huffman padding"],
)  # fmt: skip
def test_blocks_that_cannot_be_decoded(block: bytes) -> None:
    raw = Raw()
    raw.send(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, block))
    assert raw.goaway == code.COMPRESSION_ERROR


@case(50, "RFC 9113 10.5.1", "CVE-2016-6581")
def test_hpack_bomb() -> None:
    raw = Raw()
    encoder = Encoder()
    seed = encoder.encode([*f.GET, (b"bomb", b"x" * 3900)])
    raw.send(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, seed))
    tracemalloc.start()
    raw.send(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 3, b"\xbe" * 16_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert raw.goaway == code.ENHANCE_YOUR_CALM
    assert peak < 256 << 10


@case(51, "RFC 7541 4.2", "RFC 9113 6.5.2")
@pytest.mark.parametrize("sizes", [[(1 << 32) - 1], [0, 0], [0, 4096], [100, 65_536]])
def test_header_table_size_of_the_client(sizes: list[int]) -> None:
    """Our encoder uses no table, says so, and a decoder that holds us to the client's limits agrees."""
    raw = Raw(greet=False)
    raw.send(f.hello(*[]), *[f.settings((1, size)) for size in sizes])
    decoder = Decoder()
    decoder.max_allowed_table_size = min(sizes)
    for sid in range(1, 201, 2):
        raw.send(f.get(sid))
        raw.requests()[-1].reply.whole(200, [(b"x-request-id", b"%032d" % sid)], b"")
        raw.flush()
    for out in (o for o in raw.out if o.type == f.HEADERS):
        assert dict(decoder.decode(out.payload, raw=True))[b"x-request-id"] == b"%032d" % out.sid
    decoder.max_allowed_table_size = 0
    assert not decoder.header_table.dynamic_entries
    assert not raw.core.conn.encoder.header_table.dynamic_entries
    assert raw.core.conn.encoder.header_table_size <= 4096


@case(52, "RFC 9113 8.2.1", "RFC 9113 10.3")
@pytest.mark.parametrize(
    "field",
    [
        (b"x-id", b"a\r\nset-cookie: x"), (b"x\n", b"v"), (b"X-Id", b"v"), (b"x", "v"), (b"te", b"trailers"),
        (b":status", b"200"), (b"x", b" v"), (b"", b"v"),
    ],
)  # fmt: skip
def test_our_own_bad_fields_are_never_sent(field: Field) -> None:
    raw = Raw()
    raw.send(f.get(1), f.get(3))
    one, two = (request.reply for request in raw.requests())
    with pytest.raises(BadHeader):
        one.start(200, [(b"x-ok", b"1"), field])
    with pytest.raises(BadHeader):
        one.whole(200, [field], b"body")
    one.whole(500, [], b"instead")
    two.start(200, [])
    with pytest.raises(BadHeader):
        two.end([field])
    two.end()
    raw.flush()
    assert (raw.status(1), raw.body(1), raw.status(3)) == (500, b"instead", 200)
    assert raw.healthy
