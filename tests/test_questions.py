"""compare, measure, plan and forecast from Python: the same answers as from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import scalewise as sw
from scalewise.errors import RunFolderError, UsageError
from test_plan import recorded  # noqa: F401  (a fixture)

TIMES = ("run", "seconds", "samples_per_second", "takes", "jobs")


def without_times(value: Any) -> Any:
    """A JSON value without what two runs of the same question differ in."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def assert_same(found: dict[str, Any], printed: dict[str, Any]) -> None:
    assert [*found] == [*printed]  # the order of keys too
    assert without_times(json.loads(json.dumps(found))) == without_times(printed)


def my_task() -> sw.Task:
    """A task that no other process can load."""
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0.3).long()
    return sw.Task(
        model=lambda: torch.nn.Linear(3, 2),
        train=(x, y),
        test=(x, y),
        loss=F.cross_entropy,
        metrics={"accuracy": sw.accuracy},
        recipe=sw.Recipe(worker_batch=8, epochs=1.0, threads=1),
    )


def test_compare(scalewise, tmp_path):
    flags = ["--workers", 2, "--seeds", 1, "--rows", "single,naive", "--steps", 2, "--jobs", 1]
    printed = scalewise("compare", "linear", *flags, "--json").json
    found = sw.compare("linear", workers=2, seeds=1, rows=["single", "naive"], steps=2, jobs=1, out=tmp_path / "table")
    assert_same(found.to_json(), printed)
    assert json.loads((tmp_path / "table" / "compare.json").read_text()) == found.to_json()
    assert json.loads((tmp_path / "table" / "request.json").read_text())["rows"] == "single,naive"
    with pytest.raises(RunFolderError, match="begun with given"):
        sw.compare("linear", resume=tmp_path / "table", lr=0.5)


def test_compare_a_task_in_this_process(tmp_path, monkeypatch):
    events = []
    monkeypatch.chdir(tmp_path)
    found = sw.compare(
        my_task(), workers=2, seeds=2, rows="single,naive,batch-norm", follow=lambda table, event: events.append(event)
    )
    rows = {row.name: row for row in found.comparison.rows()}
    assert [*rows] == ["single", "naive"]
    assert [row.name for row in found.comparison.skipped] == ["batch-norm"]  # it cannot be loaded with bn=true
    assert [len(row.test.values) for row in rows.values()] == [2, 2]
    *_, alone = sw.train(my_task(), sw.Recipe(workers=2, worker_batch=8, epochs=1.0, threads=1, seed=1))
    assert rows["naive"].test.values[1] == alone.test["accuracy"]
    assert [event.title for event in events if hasattr(event, "jobs") and hasattr(event, "title")] == ["training"]


def test_measure(scalewise_here, tmp_path):
    flags = ["--workers", 4, "--steps", 12, "--threads", 1, "--skip", "memory", "--skip", "throughput"]
    printed = scalewise_here("measure", "linear", *flags, "--json").json
    found = sw.measure("linear", workers=4, steps=12, threads=1, skip=["memory", "throughput"], out="found")
    assert_same(found.to_json(), printed)
    assert json.loads(Path("found/measure.json").read_text()) == found.to_json()
    again = sw.measure("linear", resume="found", skip=["memory", "throughput"])
    assert (again.recipe, again.folder) == (found.recipe, Path("found"))


def test_measure_a_task_in_this_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    found = sw.measure(my_task(), steps=8, skip=["throughput"], notify=said.append)
    assert found.noise is not None
    assert found.memory is None
    assert any("other processes cannot load the task" in line for line in said)


def test_plan(scalewise_here, recorded):  # noqa: F811
    flags = ["--workers", "2,4", "--from", recorded, "--price", "2.50/h", "--deadline", "1h", "--link", "25gbit"]
    printed = scalewise_here("plan", "digits", *flags, "--json").json
    found = sw.plan(
        "digits", workers=[2, 4], source=recorded, price=2.5, deadline=3600, link="25gbit", write=["slurm"], out="found"
    )
    assert found.to_json() == printed | {"run": "found"}
    assert [*found.to_json()] == [*printed]
    assert [path.name for path in found.job_files if path.is_file()] == ["job.slurm"]
    task = sw.load_task("digits")
    assert sw.plan(task, workers=[2, 4], source=recorded, link="25gbit").plan.facts == found.plan.facts


def test_forecast(scalewise_here):
    flags = ["--shares", "5,10,20,40", "--seeds", 1, "--epochs", 0.2, "--threads", 1, "--target", 0.3]
    printed = scalewise_here("forecast", "digits", *flags, "--json").json
    given = {"shares": [5, 10, 20, 40], "seeds": 1, "epochs": 0.2, "threads": 1, "target": 0.3}
    found = sw.forecast("digits", **given, out="found")
    assert_same(found.to_json(), printed)
    task = sw.load_task("digits")
    assert sw.forecast(task, **given, resume="found").trained == found.trained  # read, not trained again


def test_forecast_a_task_in_this_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = sw.forecast(my_task(), shares=[5, 10, 20, 40], seeds=1)
    assert [one.samples for one in found.trained] == [10, 20, 40, 80]
    with pytest.raises(UsageError, match="sizes needs a task that is loaded by name"):
        sw.forecast(my_task(), sizes="hidden=1,2,3,4")


@pytest.mark.parametrize("ask", [sw.compare, sw.measure, sw.plan, sw.forecast])
def test_mistakes(ask, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'wrokers'; options are .* fields of sw.Recipe"):
        ask("digits", wrokers=8)
    with pytest.raises(UsageError, match="set and data are for tasks that are loaded by name"):
        ask(my_task(), set={"bn": True})
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="without torchrun"):
        ask("digits")
    assert not [*tmp_path.iterdir()]
