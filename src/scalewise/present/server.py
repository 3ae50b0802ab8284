"""A server on this machine's own address: every request is checked, nothing is written, followers share the work."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import resource
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar
from urllib.parse import parse_qsl, unquote, urlencode

from scalewise.errors import RunFolderError, UsageError
from scalewise.present import page, stored
from scalewise.present.stored import Kind, Run, fingerprint, kind_of
from scalewise.present.stories import forecast, measure, plan
from scalewise.present.stories.train import outcome
from scalewise.present.words import number

LONGEST_HEAD = 16_384
SECONDS = 10.0  # that a browser may take to ask, or to take in an answer
HOSTS = frozenset({"127.0.0.1", "localhost"})
# Headers of every answer: nothing is cached, sniffed, framed or passed on.
HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
ADDRESS = "127.0.0.1"
POLL_SECONDS = 1.0
STILL_HERE_SECONDS = 15.0
BACKLOG = 2048
SPARE_FILES = 64
KEPT_PAGES, KEPT_LINES = 16, 4_000
MOST_CHOSEN = 50  # runs on one page
ANSWERS = {"plan": plan.answer, "forecast": forecast.answer, "measure": measure.answer}

Names = tuple[str, ...]
Found = TypeVar("Found")


def serve(folder: Path, port: int, ready: Callable[[str], None]) -> int:
    """Serve the runs in a folder until a signal arrives; returns its number.

    `ready` receives the address, with its token, once it is served; port 0 is any that is free.
    """
    if not folder.is_dir():
        raise RunFolderError(f"serve needs a folder of runs, found no folder {folder}; check the path")
    if not 0 <= port <= 65535:
        raise UsageError(f"--port must be between 0 (any that is free) and 65535, got {port}")
    token = secrets.token_urlsafe(24)
    server = Server(Library(folder), token)
    try:
        return asyncio.run(server.run(port, lambda bound: ready(f"http://{ADDRESS}:{bound}/{token}/")))
    except OSError as error:
        raise UsageError(f"--port {port} cannot be used: {error.strerror}; choose another, or none") from None


@dataclass
class Channel:
    """Everybody who follows the same runs: the state they know, and what wakes them when it changes."""

    version: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    followers: int = 0


class Server:
    """Connections and followers. Reading and drawing happen in one other thread, so that answering never waits."""

    def __init__(self, library: Library, token: str) -> None:
        self._library, self._token = library, token
        self._reader = ThreadPoolExecutor(1)
        self._making: dict[Names, asyncio.Task[bytes]] = {}
        self._channels: dict[Names, Channel] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._most = _allow_files() - SPARE_FILES

    async def run(self, port: int, ready: Callable[[int], None]) -> int:
        """Serve until a signal arrives; returns its number."""
        loop = asyncio.get_running_loop()
        stopped: asyncio.Queue[int] = asyncio.Queue()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, stopped.put_nowait, one)
        server = await asyncio.start_server(self._connect, ADDRESS, port, limit=LONGEST_HEAD, backlog=BACKLOG)
        watching = asyncio.create_task(self._watch())
        ready(server.sockets[0].getsockname()[1])
        sent = await stopped.get()
        server.close()
        watching.cancel()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(watching, *self._connections, return_exceptions=True)
        self._reader.shutdown(wait=False, cancel_futures=True)
        return sent

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one answer; whoever hangs up or dawdles is let go."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if len(self._connections) > self._most:
                raise Refused(503, "too many connections; try again later")
            request = parse_request(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS))
            route = self._route(request)
            if route is None:
                await _send(writer, head(308, "text/plain; charset=utf-8", 0, location=f"/{self._token}/"))
                return
            if route == "events":
                await self._follow(request.runs, writer)
                return
            body = await self._page(request.runs if route == "runs" else ())
            top = head(200, "text/html; charset=utf-8", len(body), page.policy(live=True))
            answer = top if request.method == "HEAD" else top + body
        except asyncio.LimitOverrunError:
            answer = refusal(Refused(431, "the request is too long"))
        except Refused as refused:
            answer = refusal(refused)
        except (OSError, ValueError, ArithmeticError, LookupError, TypeError, RecursionError) as error:
            # anything may be in a run folder: what nobody thought of costs one answer, not the server
            answer = refusal(Refused(500, f"this page could not be made: {type(error).__name__}"))
        await _send(writer, answer)

    def _route(self, request: Request) -> str | None:
        """What is asked for, after the token; None without the slash, from which links would lead nowhere.

        Refuses what did not come from a page of ours: another site's name may lead here (DNS rebinding).
        """
        if request.host not in HOSTS:
            raise Refused(403, "this server answers to 127.0.0.1 and localhost only")
        if request.method not in ("GET", "HEAD"):
            raise Refused(405, "this server only shows")
        _, token, *rest = request.path.split("/")
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise Refused(403, "this address is not the one that scalewise serve printed")
        if not rest:
            return None
        name = "/".join(rest)
        if name not in ("", "runs", "events"):
            raise Refused(404, "there is nothing here")
        if name == "runs" and not request.runs:
            raise Refused(404, "no run was chosen; go back to the list")
        return name

    async def _page(self, names: Names) -> bytes:
        """A page, made once for all who ask for it at the same time."""
        making = self._making.get(names)
        if making is None:
            making = self._making[names] = asyncio.create_task(self._read(self._library.page, names))
            making.add_done_callback(lambda _: self._making.pop(names, None))
        return await asyncio.shield(making)

    async def _read(self, what: Callable[[Names], Found], names: Names) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._reader, what, names)

    async def _follow(self, names: Names, writer: asyncio.StreamWriter) -> None:
        """Tell a browser whenever there is something new, until it hangs up."""
        for name in names:
            self._library.folder(name)
        channel = self._channels.get(names)
        if channel is None:
            version = await self._read(self._library.version, names)
            channel = self._channels.setdefault(names, Channel(version))
        channel.followers += 1
        try:
            await _send(writer, head(200, "text/event-stream", None) + _event(channel.version))
            while True:
                changed = channel.changed
                try:
                    await asyncio.wait_for(changed.wait(), STILL_HERE_SECONDS)
                    await _send(writer, _event(channel.version))
                except TimeoutError:
                    await _send(writer, b": still here\n\n")
        finally:
            channel.followers -= 1
            if not channel.followers:
                self._channels.pop(names, None)

    async def _watch(self) -> None:
        """Look for something new, for all channels one after another."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for names, channel in [*self._channels.items()]:
                with contextlib.suppress(OSError):
                    version = await self._read(self._library.version, names)
                    if version != channel.version:
                        channel.version = version
                        channel.changed.set()
                        channel.changed = asyncio.Event()


def _event(version: str) -> bytes:
    return f"data: {version}\n\n".encode()


async def _send(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Hand bytes over; who does not take them in is let go."""
    writer.write(content)
    await asyncio.wait_for(writer.drain(), SECONDS)


def _allow_files() -> int:
    """As many open files, and so connections, as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 65_536 if now == resource.RLIM_INFINITY else now


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    method: str
    path: str
    runs: Names
    host: str


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


def head(
    status: int, kind: str, length: int | None, policy: str = "default-src 'none'", location: str | None = None
) -> bytes:
    """The head of an answer."""
    fields = HEADERS | {"Content-Type": kind, "Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}
    if length is not None:
        fields["Content-Length"] = str(length)
    if location is not None:
        fields["Location"] = location
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def refusal(refused: Refused) -> bytes:
    """An answer in one line of plain text."""
    body = f"{refused}\n".encode()
    return head(refused.status, "text/plain; charset=utf-8", len(body)) + body


class Refused(Exception):
    """A request that gets no page."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Library:
    """The runs in one folder. Names come from anyone and are looked up, never trusted."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._made = lru_cache(KEPT_PAGES)(self._make)
        self._known = lru_cache(KEPT_LINES)(self._read)

    def names(self) -> dict[str, Kind]:
        """All runs, newest first; the folder itself if it is one."""
        own, found = kind_of(self.root), stored.find_runs(self.root).items()
        in_addresses = {name: kind for name, kind in found if name == name.encode(errors="ignore").decode()}
        return in_addresses | ({".": own} if own else {})

    def folder(self, name: str) -> Path:
        """The folder of a run, which must really be in ours."""
        try:
            path = (self.root / name).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise Refused(404, "there is no such run") from None
        if not path.is_relative_to(self.root) or kind_of(path) is None:
            raise Refused(404, "there is no such run")
        return path

    def version(self, names: tuple[str, ...]) -> str:
        """What changes whenever a page would: of the chosen runs, or of the list for none."""
        chosen = names or tuple(self.names())
        state = [(name, fingerprint(self.root / name)) for name in chosen]
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    def page(self, names: tuple[str, ...]) -> bytes:
        """The page of the chosen runs, or the list for none."""
        if len(names) > MOST_CHOSEN:
            raise Refused(400, f"at most {MOST_CHOSEN} runs fit on a page")
        for name in names:
            self.folder(name)
        return self._made(names, self.version(names))

    def _make(self, names: tuple[str, ...], version: str) -> bytes:
        """The page, or the list, of a version."""
        if names:
            runs = [stored.read_run(self.folder(name), name, self.root) for name in names]
            title, query = ", ".join(names), urlencode([("run", name) for name in names])
            made = page.render(title, page.stories(runs, self.root), title, live=f"events?{query}", home="./")
        else:
            title, lines = self.root.name, [self._line(name, kind) for name, kind in self.names().items()]
            shown = {"title": title, "sources": title, "lines": lines, "live": "events"}
            made = page.fill("list.html", **shown, policy=page.policy(live=True))
        return made.encode(errors="replace")

    def _line(self, name: str, kind: Kind) -> dict[str, object]:
        """A run in the list."""
        files = fingerprint(self.root / name)
        said, ended = self._known(name, kind, files)
        changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.changed(self.root / name)))
        return {"name": name, "kind": kind, "said": said, "ended": ended, "changed": changed}

    def _read(self, name: str, kind: Kind, files: object) -> tuple[str, bool]:
        """What a run says with these files, and whether it has ended."""
        path = self.root / name
        document, _ = stored.read_document(path / stored.document_name(kind), self.root)
        recipe, _ = stored.read_document(path / "recipe.json", self.root)
        return _said(Run(name, path, kind, document, recipe)), document.is_object


def _said(run: Run) -> str:
    """One line on a run, from its document alone: records may be long."""
    if run.kind in ANSWERS:
        task, answer = run.document.text("task"), ANSWERS[run.kind](run.document)
        return f"{task}: {answer}" if task else answer
    if run.kind != "train":
        return " ".join(filter(None, [run.document.text("task"), run.document.text("kind")]))
    workers, task = run.recipe.number("recipe", "workers"), run.recipe.text("task") or "a run"
    said = task if workers is None else f"{task}, workers: {number(workers)}"
    return f"{said}; {outcome(run) if run.document.is_object else 'no result yet'}"
