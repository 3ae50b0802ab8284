"""The link between processes: its formula and its file."""

from __future__ import annotations

import pytest

from scalewise.errors import UsageError
from scalewise.plan import hardware
from scalewise.plan.hardware import Link


def test_a_sum_over_processes_takes_two_rounds_of_messages():
    link = Link("test", latency_seconds=1e-3, bytes_per_second=1e6)
    assert link.reduction_seconds(10**6, 1) == 0
    assert link.reduction_seconds(10**6, 4) == pytest.approx(6e-3 + 1.5)


def test_a_profile_survives_its_file(tmp_path):
    link = Link("two hosts", 2.5e-5, 1.2e8, "scalewise bench collectives")
    hardware.save_link(tmp_path / "link.json", link)
    assert hardware.load_link(tmp_path / "link.json") == link


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"kind": "link", "name": "a", "latency_seconds": 0}',
        '{"kind": "link", "name": "a", "latency_seconds": -1, "bytes_per_second": 1}',
        '{"kind": "link", "name": "a", "latency_seconds": 0, "bytes_per_second": NaN}',
        '{"kind": "run", "name": "a", "latency_seconds": 0, "bytes_per_second": 1}',
    ],
)
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "link.json").write_text(text)
    with pytest.raises(UsageError, match="kind link"):
        hardware.load_link(tmp_path / "link.json")
