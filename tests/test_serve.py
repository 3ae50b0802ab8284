"""The server: who may ask for what, and that nothing brings it down."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from conftest import environment
from test_report import FOLDERS, Outline, assert_harmless, hostile

FOLLOWERS = 1000


def write_steps(folder: Path, count: int) -> None:
    """Records as a training writes them."""
    steps = [
        {
            "kind": "step",
            "step": step,
            "samples": 32 * step,
            "epoch": step / 50,
            "loss": 2 / step,
            "lr": 0.1,
            "noise_scale": 90.0 + step,
        }
        for step in range(1, count + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


class Serving:
    """`scalewise serve` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "scalewise", "serve", str(folder), "--json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        )
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        self.url = json.loads(line)["url"]
        parts = urlsplit(self.url)
        self.host, self.port, self.token = parts.hostname, parts.port, parts.path.strip("/")

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *unused: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGTERM)
        self.process.stdout.close()
        self.process.stderr.close()

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        connection.putrequest(method, path, skip_host=True)
        for name, value in ({"Host": f"127.0.0.1:{self.port}"} | headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), dict(answer.getheaders())
        connection.close()
        return found

    def get(self, path: str) -> tuple[int, str]:
        return self.ask(f"/{self.token}/{path}")[:2]

    def send(self, content: bytes) -> bytes:
        """What comes back for any bytes."""
        with socket.create_connection((self.host, self.port), timeout=30) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, attacks among them, and a secret beside them."""
    place = tmp_path_factory.mktemp("served")
    (place / "secret").mkdir()
    (place / "secret" / "recipe.json").write_text('{"task": "top secret"}')
    folder = place / "runs"
    folder.mkdir()
    for name in ("compare", "measure", "plan"):
        (folder / name).symlink_to(FOLDERS / name)  # leads out
        (folder / f"own-{name}").mkdir()
        (folder / f"own-{name}" / f"{name}.json").write_text((FOLDERS / name / f"{name}.json").read_text())
    hostile(folder / "<img src=x onerror=alert(1)>")
    going = folder / "going"
    going.mkdir()
    (going / "recipe.json").write_text(json.dumps({"task": "digits", "recipe": {"workers": 8, "worker_batch": 32}}))
    write_steps(going, 20)
    linked = folder / "linked"
    linked.mkdir()
    (linked / "recipe.json").symlink_to(place / "secret" / "recipe.json")
    (linked / "metrics.jsonl").symlink_to("/etc/passwd")
    (folder / "pipe").mkdir()
    (folder / "pipe" / "recipe.json").write_text("{}")
    os.mkfifo(folder / "pipe" / "metrics.jsonl")  # reading it would wait for ever
    return folder


@pytest.fixture(scope="module")
def serving(runs: Path) -> Iterator[Serving]:
    with Serving(runs) as found:
        yield found


def test_the_list_and_every_page_are_served_with_strict_headers(serving):
    status, text, headers = serving.ask(f"/{serving.token}/")
    assert status == 200
    shown = Outline(text)
    for name in ("own-compare", "own-measure", "own-plan", "going", "linked"):
        assert name in shown.text
        assert serving.get(f"runs?run={name}")[0] == 200
    assert "digits: 4 workers: 1.2 s instead of" in shown.text  # what came out
    assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", shown.text)  # not an age, which a kept page would have wrong
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert serving.ask(f"/{serving.token}/", "HEAD")[:2] == (200, "")


def test_hostile_folders_are_served_as_text(serving):
    name = quote("<img src=x onerror=alert(1)>")
    status, text = serving.get(f"runs?run={name}&run=own-compare")
    assert status == 200
    assert_harmless(Outline(text))
    assert Outline(serving.get("")[1]).count("img") == 0


def test_the_address_without_its_last_slash_leads_to_the_list(serving):
    status, _, headers = serving.ask(f"/{serving.token}")
    assert (status, headers["Location"]) == (308, f"/{serving.token}/")


@pytest.mark.parametrize(
    "path", ["/", "/favicon.ico", "/wrong/", "/wrong/runs?run=going", "//", "/{token}x/", "/%7Btoken%7D/"]
)
def test_without_the_token_there_is_nothing(serving, path):
    status, text, _ = serving.ask(path.replace("{token}", serving.token))
    assert status == 403
    assert "going" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1]", "0.0.0.0"])
def test_foreign_hosts_are_refused(serving, host):
    status, text, _ = serving.ask(f"/{serving.token}/", Host=host)
    assert status == 403
    assert "going" not in text
    assert serving.ask(f"/{serving.token}/", Host=f"localhost:{serving.port}")[0] == 200


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "going/../../secret",
        "..",
        "/etc",
        "%2e%2e/secret",
        "..%2fsecret",
        "compare",
        "going%00",
        "missing",
        "x" * 9000,
        "~",
        "going/metrics.jsonl",
    ],
)
def test_nothing_outside_the_folder_is_shown(serving, name):
    for route in ("runs", "events"):
        status, text = serving.get(f"{route}?run={name}")
        assert status == 404
        assert "top secret" not in text


@pytest.mark.parametrize(
    "path", ["../secret/recipe.json", "..%2f..%2fetc/passwd", "going/metrics.jsonl", "assets/page.js", "runs/", "runs"]
)
def test_paths_lead_nowhere_else(serving, path):
    assert serving.get(path)[0] == 404


def test_files_that_lead_out_of_the_folder_are_not_read(serving):
    status, text = serving.get("runs?run=linked")
    assert status == 200
    assert "recipe.json is not a file of this folder" in text
    assert "top secret" not in text
    assert "root:" not in text
    assert serving.get("runs?run=pipe")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_it_only_shows(serving, method):
    assert serving.ask(f"/{serving.token}/", method)[0] == 405


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"\x00\xff\x16\x03\x01\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"GET http://127.0.0.1/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil\r\n\r\n", b"400"),
        (b"GET /?run=%ff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"400"),
        (b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n", b""),
        (b"", b""),
    ],
)
def test_what_is_no_request_is_refused(serving, content, status):
    answer = serving.send(content)
    assert answer.startswith(b"HTTP/1.1 " + status) if status else answer == b""
    assert serving.get("")[0] == 200


async def _first_event(reader: asyncio.StreamReader) -> bytes:
    await reader.readuntil(b"\r\n\r\n")
    return await reader.readuntil(b"\n\n")


async def _crowd(serving: Serving, folder: Path) -> tuple[set[bytes], set[bytes], int]:
    """Everybody's first and second event, and the status of another request in between."""
    request = f"GET /{serving.token}/events?run=going HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()

    async def follower() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(serving.host, serving.port)
        writer.write(request)
        return reader, writer

    everybody = await asyncio.gather(*(follower() for _ in range(FOLLOWERS)))
    first = await asyncio.gather(*(_first_event(reader) for reader, _ in everybody))
    status = (await asyncio.to_thread(serving.get, "runs?run=going"))[0]
    write_steps(folder / "going", 21)
    second = await asyncio.gather(*(reader.readuntil(b"\n\n") for reader, _ in everybody))
    for _, writer in everybody:
        writer.close()
    return set(first), set(second), status


def test_a_thousand_follow_a_run_and_all_hear_of_its_next_step(serving, runs):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * FOLLOWERS:
        pytest.skip(f"this system allows a process {hard} files, {2 * FOLLOWERS} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * FOLLOWERS), hard))
    try:
        first, second, status = asyncio.run(asyncio.wait_for(_crowd(serving, runs), 120))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert status == 200
    assert len(first) == len(second) == 1  # the same for all
    assert first != second
    assert serving.get("runs?run=going")[0] == 200


def test_an_empty_folder_says_so_and_signals_end_it(tmp_path):
    with Serving(tmp_path) as serving:
        assert "no runs here yet" in serving.get("")[1]
        code, said = serving.end(signal.SIGINT)
    assert code == 130
    assert "Traceback" not in said
    assert said.count("\n") == 4  # where it is, who may open it, and that it has ended
    (tmp_path / "recipe.json").write_text('{"task": "itself"}')
    with Serving(tmp_path) as serving:
        assert "itself" in serving.get("runs?run=.")[1]
        with socket.create_connection((serving.host, serving.port)):  # somebody is still connected
            assert serving.end(signal.SIGTERM)[0] == 143


def test_mistakes_are_one_clear_line(scalewise_here, tmp_path, serving):
    for arguments, words in (
        (["missing"], "found no folder missing"),
        ([".", "--port", "70000"], "--port must be between 0"),
        ([".", "--port", str(serving.port)], "cannot be used"),
    ):
        done = scalewise_here("serve", *arguments)
        assert done.code == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
