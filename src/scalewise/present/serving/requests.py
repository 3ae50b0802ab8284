"""HTTP as far as it is needed: a request read, checked and answered, one per connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

LONGEST_HEAD = 16_384
SECONDS = 10.0  # that a browser may take to ask, or to take in an answer
HOSTS = frozenset({"127.0.0.1", "localhost"})
STATUS = {
    200: "OK",
    308: "Permanent Redirect",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
# What a browser is told of every answer: nothing is kept, guessed, framed or passed on.
HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    method: str
    path: str
    runs: tuple[str, ...]
    host: str


class Refused(Exception):
    """A request that gets no page."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request on a connection."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
    except asyncio.LimitOverrunError:
        raise Refused(431, "the request is too long") from None
    return parse_request(head)


def parse_request(head: bytes) -> Request:
    """A request from the bytes before its body.

    >>> parse_request(b"GET /token/runs?run=a&run=b HTTP/1.1\\r\\nHost: localhost:80\\r\\n\\r\\n")
    Request(method='GET', path='/token/runs', runs=('a', 'b'), host='localhost')
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[1].startswith("/") or not words[2].startswith("HTTP/1."):
        raise Refused(400, "this is not a request")
    hosts = [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.lower() == "host"]
    if len(hosts) != 1:
        raise Refused(400, "a request needs one Host")
    try:
        path, _, query = words[1].partition("?")
        pairs = parse_qsl(query, errors="strict", max_num_fields=200)
        path = unquote(path, errors="strict")
    except ValueError:  # of which bad bytes are one kind
        raise Refused(400, "this is not an address") from None
    return Request(words[0], path, tuple(value for name, value in pairs if name == "run"), hosts[0].partition(":")[0])


def check(request: Request) -> None:
    """Refuse what did not come from a page of ours: another site's name may lead here (DNS rebinding)."""
    if request.host not in HOSTS:
        raise Refused(403, "this server answers to 127.0.0.1 and localhost only")
    if request.method not in ("GET", "HEAD"):
        raise Refused(405, "this server only shows")


def head(
    status: int, kind: str, length: int | None, policy: str = "default-src 'none'", location: str | None = None
) -> bytes:
    """The head of an answer."""
    fields = HEADERS | {"Content-Type": kind, "Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}
    if length is not None:
        fields["Content-Length"] = str(length)
    if location is not None:
        fields["Location"] = location
    lines = [f"HTTP/1.1 {status} {STATUS[status]}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def refusal(refused: Refused) -> bytes:
    """An answer in one line of plain text."""
    body = f"{refused}\n".encode()
    return head(refused.status, "text/plain; charset=utf-8", len(body)) + body
