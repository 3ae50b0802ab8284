from __future__ import annotations

import json

import pytest

from scalewise.errors import RunFolderError
from scalewise.records import Epoch, RecordWriter, Step, keep_until, line, read


def step(number: int) -> Step:
    return Step(number, number / 2, number * 8, 0.1, 1.5, {"accuracy": 0.5}, 0.25, None, None)


def epoch(number: int) -> Epoch:
    return Epoch(number, 1.0, 8, 0.1, {"loss": 1.0}, None, False, 0.5, 100.0)


def test_a_record_is_one_line_of_json():
    record = json.loads(line(Step(1, 0.5, 8, 0.1, float("nan"), {}, 0.25)))
    assert record["kind"] == "step"
    assert record["loss"] is None


def test_writes_in_batches_and_flushes_at_epochs(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = RecordWriter(path, batch=10)
    for number in range(1, 4):
        writer.write(step(number))
    assert path.read_text() == ""
    writer.write(epoch(3))
    assert [record["step"] for record in read(path)] == [1, 2, 3, 3]
    writer.close()


def test_a_torn_last_line_is_left_out_and_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [line(step(number)) for number in (1, 2, 3)]
    path.write_text("\n".join(lines) + '\n{"kind": "st')
    assert [record["step"] for record in read(path)] == [1, 2, 3]
    keep_until(path, 2)
    assert path.read_text() == "\n".join(lines[:2]) + "\n"


def test_damage_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step"\n' + line(step(1)) + "\n")
    with pytest.raises(RunFolderError, match="line 1"):
        list(read(path))
