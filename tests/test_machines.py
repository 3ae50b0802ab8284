"""Several machines: hosts made of network namespaces, and training across them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from conftest import environment
from scalewise.engine.processes.team import choose_interface, interface_towards
from scalewise.errors import PlacementError
from scalewise.runs.bench.common import Host, hosts, reason_unavailable

REASON = reason_unavailable()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=REASON or "")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up on Linux only")
SECONDS = 120
PORT = 29500
TRAIN = ["train", "digits", "--workers", "6", "--steps", "6", "--json", "--quiet", "--out", "run"]

# The receiver says when all senders may go and when everything of one has arrived; each sender prints the time between.
RECEIVE = """
import socket, sys, threading
address, senders = sys.argv[1], int(sys.argv[2])

def receive(stream):
    stream.sendall(b"g")
    while stream.recv(1 << 16):
        pass
    stream.sendall(b"e")

with socket.create_server((address, 29500)) as server:
    server.settimeout(60)
    streams = [server.accept()[0] for _ in range(senders)]
threads = [threading.Thread(target=receive, args=(stream,)) for stream in streams]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
SEND = """
import socket, sys, time
address, size = sys.argv[1], int(sys.argv[2])
deadline = time.monotonic() + 60
while True:
    try:
        stream = socket.create_connection((address, 29500), timeout=60)
        break
    except ConnectionRefusedError:
        assert time.monotonic() < deadline
        time.sleep(0.01)
assert stream.recv(1) == b"g"
start = time.monotonic()
stream.sendall(bytes(size))
stream.shutdown(socket.SHUT_WR)
assert stream.recv(1) == b"e"
print(time.monotonic() - start)
"""


@contextmanager
def started(folder: Path, commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes with a folder each, where their output is; ended at the end."""
    variables = {name: value for name, value in environment().items() if name != "GLOO_SOCKET_IFNAME"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            place = folder / str(number)
            place.mkdir()
            with (place / "stdout").open("wb") as out, (place / "stderr").open("wb") as errors:
                processes.append(subprocess.Popen(command, cwd=place, env=variables, stdout=out, stderr=errors))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def outputs(folder: Path, commands: Sequence[Sequence[str]]) -> list[str]:
    """What each of the commands, run at the same time, printed; all must succeed."""
    deadline = time.monotonic() + SECONDS
    with started(folder, commands) as processes:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        codes = [process.poll() for process in processes]  # None: not ended in time
    places = [folder / str(number) for number in range(len(commands))]
    assert codes == [0] * len(commands), "\n".join((place / "stderr").read_text() for place in places)
    return [(place / "stdout").read_text() for place in places]


def seconds_to_send(folder: Path, receiver: Host, senders: Sequence[Host], size: int) -> float:
    """How long the slowest of the senders takes to bring `size` bytes each to the receiver."""
    receive = receiver.command([sys.executable, "-c", RECEIVE, receiver.address, str(len(senders))])
    sends = [sender.command([sys.executable, "-c", SEND, receiver.address, str(size)]) for sender in senders]
    folder.mkdir()
    return max(float(text) for text in outputs(folder, [receive, *sends])[1:])


def namespaces() -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=10, check=True).stdout
    return [line.split()[0] for line in listing.splitlines() if line.startswith(f"scalewise-{os.getpid()}-")]


def links() -> str:
    """The names of the machine's own interfaces."""
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, timeout=10, check=True).stdout


@needs_hosts
def test_the_rate_limits_a_link_in_both_directions(tmp_path):
    with hosts(2) as (first, second):
        unlimited = seconds_to_send(tmp_path / "unlimited", first, [second], 4 << 20)
    with hosts(2, rate="100mbit") as (first, second):
        there = seconds_to_send(tmp_path / "there", second, [first], 4 << 20)
        back = seconds_to_send(tmp_path / "back", first, [second], 4 << 20)
    assert min(there, back) >= 0.25  # 4 MiB at 100 Mbit/s are 0.34 s, less what the buckets let through at once
    assert unlimited < min(there, back) / 2


@needs_hosts
def test_senders_to_one_host_share_its_link(tmp_path):
    with hosts(3, rate="100mbit") as (first, *others):
        assert seconds_to_send(tmp_path / "shared", first, others, 2 << 20) >= 0.25


@needs_hosts
def test_hosts_are_apart_and_leave_the_machine_alone():
    before = links()
    with hosts(2) as (first, second), hosts(1) as (other,):
        assert len({first.name, second.name, other.name}) == 3
        assert first.address != second.address
        assert links() == before
        assert len(namespaces()) == 5  # with a switch for each call
    assert links() == before
    assert namespaces() == []


@needs_hosts
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_remains_after_an_error(error):
    sleep = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    sleepers: list[subprocess.Popen[bytes]] = []

    def fail() -> None:
        with hosts(2) as (host, _):
            sleepers.append(subprocess.Popen(host.command(sleep), stdout=subprocess.PIPE))
            assert sleepers[0].stdout.readline() == b"here\n"
            assert host.name in namespaces()
            raise error

    try:
        with pytest.raises(error):
            fail()
        assert sleepers[0].wait(timeout=10) == -signal.SIGKILL
        assert namespaces() == []
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.communicate()


@needs_hosts
def test_nothing_remains_of_hosts_that_could_not_be_made():
    with pytest.raises(PlacementError, match="rate"), hosts(2, rate="quick"):
        pass
    assert namespaces() == []


@pytest.mark.parametrize("count", [0, 255])
def test_the_number_of_hosts_is_checked(count):
    with pytest.raises(PlacementError, match=f"from 1 to 254, got {count}"), hosts(count):
        pass


@needs_linux
@pytest.mark.parametrize(
    ("host", "interface"),
    [("127.0.0.1", "lo"), ("127.0.1.1", "lo"), ("localhost", "lo"), ("::1", None), ("a..b", None)],
)
def test_the_interface_on_one_machine(host, interface):
    assert interface_towards(host) == interface


@needs_linux
def test_the_users_interface_is_kept(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "theirs")
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "theirs"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    choose_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@needs_hosts
def test_the_interface_on_several_machines(tmp_path):
    found = "from scalewise.engine.processes.team import interface_towards"
    ask = f"import sys; {found}; print([interface_towards(address) for address in sys.argv[1:]])"
    with hosts(2) as (first, second):
        nowhere = "192.0.2.1"
        command = [sys.executable, "-c", ask, first.address, second.address, "127.0.0.1", nowhere]
        assert outputs(tmp_path, [first.command(command)]) == ["['eth0', 'eth0', 'lo', None]\n"]


def by_rendezvous(machines: Sequence[Host], number: int) -> list[str]:
    """Arguments of torchrun that let the machines find each other at the first one.

    torchrun knows that it is the first one by its host name, and the hosts have but one name between them.
    """
    endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:{PORT}", "--rdzv-id", "x"]
    return [*endpoint, "--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", machines[number].address]


def by_number(machines: Sequence[Host], number: int) -> list[str]:
    """Arguments of torchrun that number the machines; none is told its own address."""
    return ["--master-addr", machines[0].address, "--master-port", str(PORT), "--node-rank", str(number)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The weights of one process, as a function of further arguments."""
    known: dict[tuple[str, ...], str] = {}

    def weights(*more: str) -> str:
        if more not in known:
            command = [sys.executable, "-m", "scalewise", *TRAIN, "--processes", "1", *more]
            (text,) = outputs(tmp_path_factory.mktemp("one"), [command])
            known[more] = json.loads(text)["weights_sha256"]
        return known[more]

    return weights


@needs_hosts
@pytest.mark.parametrize(
    ("count", "processes", "rate", "meet", "more"),
    [
        pytest.param(2, 1, "100mbit", by_rendezvous, [], id="2 hosts, 100 Mbit/s"),
        pytest.param(3, 1, None, by_number, [], id="3 hosts"),
        pytest.param(2, 2, None, by_rendezvous, ["--set", "bn=true"], id="2 hosts with 2 processes, batch norm"),
    ],
)
def test_several_machines_give_the_bytes_of_one_process(tmp_path, one_process, count, processes, rate, meet, more):
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", str(processes)]
    with hosts(count, rate) as machines:
        commands = [
            host.command([*run, *meet(machines, number), "-m", "scalewise", *TRAIN, *more])
            for number, host in enumerate(machines)
        ]
        spoken = [text for text in outputs(tmp_path, commands) if text]
    assert len(spoken) == 1  # only process 0 speaks
    result = json.loads(spoken[0])
    assert result["weights_sha256"] == one_process(*more)
    assert result["processes"] == count * processes
