"""`scalewise compare` as a person or a script meets it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import textwrap
from pathlib import Path

import psutil
import pytest

import scalewise as sw
from scalewise.cli.compare import compare
from scalewise.engine.loop import Training
from scalewise.engine.processes.signals import Stop
from scalewise.errors import RunFolderError, UsageError
from scalewise.recipe import Recipe
from scalewise.runs.compare.compare import BegunComparison
from scalewise.runs.compare.jobs import Job, Outcome, Setup
from scalewise.runs.compare.rows import Line, RowPlan
from scalewise.runs.compare.trainings import facts, perform
from scalewise.runs.request import check_unchanged, load_request
from test_resume import kill_tree, start, wait_for

ROW_KEYS = {
    "name", "workers", "global_batch", "lr", "optimizer", "steps", "samples", "test", "train", "samples_per_second",
    "seconds", "seeds", "difference", "failed", "diverged", "what", "settings", "derived", "beats_noise",
}  # fmt: skip
WORKING = ["single", "naive", "batch-norm", "lr-scaled", "warm-up", "auto"]


def trained(task: str, *settings: str, **fields: object) -> sw.Result:
    """What training gives without `compare`."""
    loaded = sw.load_task(task, settings)
    *_, last = sw.train(loaded, loaded.recipe.replace(threads=1, **fields))
    return last


def test_the_json_is_the_contract_and_more_seeds_are_added_on_resume(scalewise, tmp_path):
    flags = ["--workers", 2, "--epochs", 1, "--rows", ",".join(WORKING), "--jobs", 1]
    outcome = scalewise("compare", "digits", *flags, "--seeds", 1, "--out", "table", "--json")
    document = outcome.json
    assert document["metric"] == {"name": "accuracy", "higher_is_better": True}
    assert [row["name"] for row in document["rows"]] == WORKING
    assert all(set(row) == ROW_KEYS for row in document["rows"])
    assert [row["workers"] for row in document["rows"]] == [1, 2, 2, 2, 2, 2]
    assert [row["lr"] for row in document["rows"][:5]] == [0.02, 0.02, 0.02, 0.04, 0.04]
    assert [row["settings"] for row in document["rows"]] == [[], [], ["bn=true"], ["bn=true"], ["bn=true"], []]
    assert [row["steps"] for row in document["rows"][:5]] == [45, 22, 22, 22, 22]
    assert document["rows"][5]["derived"]  # auto says what it chose
    assert all(row["beats_noise"] is None and row["test"]["std"] is None for row in document["rows"])
    assert (tmp_path / "table" / "compare.json").read_text() == outcome.stdout
    run = tmp_path / "table" / "naive-2w-seed0"
    stored = json.loads((run / "result.json").read_text())
    expected = trained("digits", workers=2, epochs=1.0)
    assert stored["weights_sha256"] == expected.weights_sha256
    assert document["rows"][1]["test"]["values"] == [expected.test["accuracy"]]
    assert {path.name for path in run.iterdir()} >= {
        "recipe.json", "env.json", "metrics.jsonl", "checkpoints", "result.json",
    }  # fmt: skip
    curve = next(curve for curve in document["curves"] if curve["name"] == "naive")
    assert curve["train"][-1] == expected.train["accuracy"]
    assert "1 run at a time" in outcome.stderr

    more = scalewise(
        "compare", "digits", "--resume", "table", "--seeds", 2, "--rows", "single,naive", "--jobs", 1, "--json"
    )
    assert [row["name"] for row in more.json["rows"]] == ["single", "naive"]
    assert [row["test"]["values"][0] for row in more.json["rows"]] == [
        row["test"]["mean"] for row in document["rows"][:2]
    ]
    assert [row["seeds"] for row in more.json["rows"]] == [[0, 1], [0, 1]]
    assert more.json["rows"][1]["beats_noise"] in (True, False)
    assert json.loads((run / "result.json").read_text()) == stored  # read, not trained again
    assert "already done" in more.stderr
    stored = load_request(tmp_path / "table", BegunComparison)
    assert (stored.seeds, stored.rows) == (2, "single,naive")
    with pytest.raises(RunFolderError, match=r"begun with given=.'epochs': 1.0., got .'lr': 0.5."):
        check_unchanged(tmp_path, stored, dataclasses.replace(stored, given={"lr": 0.5}))


def test_another_optimizer_has_the_rate_that_train_gives_it(scalewise):
    flags = ["--optimizer", "adam", "--epochs", 0.2]
    alone = scalewise("train", "digits", *flags, "--threads", 1, "--json", "--quiet").json
    row = scalewise("compare", "digits", *flags, "--rows", "single", "--seeds", 1, "--jobs", 1, "--json").json["rows"][
        0
    ]
    assert row["lr"] == alone["lr"]["peak"] != 0.02
    assert row["test"]["values"] == [alone["test"]["accuracy"]]
    assert row["what"] == f"1 worker, the task's own recipe but for epochs 0.2, optimizer adam, lr {row['lr']}"


def test_killed_and_resumed_gives_the_same_numbers(scalewise, tmp_path):
    flags = ["--workers", "4", "--epochs", "4", "--seeds", "2", "--rows", "single,lr-scaled", "--jobs", "1"]
    process = start(tmp_path, "compare", "digits", *flags, "--out", "table")
    table = tmp_path / "table"

    def half_way() -> bool:  # one run is finished and another one has a checkpoint
        started = [path.parent.parent for path in table.glob("*/checkpoints/step-*")]
        return bool([*table.glob("*/result.json")]) and any(not (run / "result.json").exists() for run in started)

    wait_for(half_way, process)
    kill_tree(process)
    finished = {path: path.read_text() for path in table.glob("*/result.json")}
    assert 1 <= len(finished) < 4
    rows = scalewise("compare", "digits", "--resume", "auto", "--out", "table", "--jobs", 1, "--json").json["rows"]
    assert finished == {path: path.read_text() for path in finished}
    for row, recipe in zip(rows, [{"workers": 1}, {"workers": 4, "lr_rule": "linear"}], strict=True):
        results = [trained("digits", *row["settings"], epochs=4.0, seed=seed, **recipe) for seed in (0, 1)]
        assert row["test"]["values"] == [result.test["accuracy"] for result in results]
        assert row["steps"] == results[0].steps


def test_ctrl_c_saves_everything_and_leaves_nobody_behind(tmp_path):
    flags = ["--workers", "2", "--epochs", "10000", "--rows", "single,naive", "--out", "table", "--jobs", "2"]
    process = start(tmp_path, "compare", "digits", *flags)
    table = tmp_path / "table"
    wait_for(lambda: len([*table.glob("*/checkpoints")]) == 2, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    for member in [*children, psutil.Process(process.pid)]:  # as a terminal does
        os.kill(member.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert stderr.strip().splitlines()[-1].endswith("continue with the same command and --resume table")
    assert not psutil.wait_procs(children, timeout=20)[1]
    for run in ("single-1w-seed0", "naive-2w-seed0"):
        last = json.loads((table / run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
        assert (table / run / "checkpoints" / f"step-{last}").is_dir()
    assert json.loads((table / "compare.json").read_text())["rows"][0]["test"]["values"] == []
    assert not [*table.glob("*.log")]


TASK = """
    import os, signal, torch, scalewise as sw
    from torch.nn import functional as F

    class Model(torch.nn.Linear):
        def forward(self, x):
            {body}
            return super().forward(x)

    def task(validate: bool = False) -> sw.Task:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(64, 3, generator=generator)
        y = (x.sum(1) > 0).long()
        return sw.Task(
            model=lambda: Model(3, 2), train=(x, y), test=(x, y), validation=(x, y) if validate else None,
            loss=F.cross_entropy, metrics={{"accuracy": sw.accuracy}}, recipe=sw.Recipe(worker_batch=8, epochs=2.0),
        )
"""


def write_task(tmp_path: Path, body: str = "pass") -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(TASK).format(body=body))


def test_a_process_that_dies_is_named_and_the_others_go_on(scalewise, tmp_path):
    write_task(tmp_path, "if os.path.isdir('table/naive-2w-seed0'): os.kill(os.getpid(), signal.SIGKILL)")
    flags = ["--workers", 2, "--rows", "single,naive", "--seeds", 1, "--jobs", 1, "--out", "table", "--json"]
    outcome = scalewise("compare", "mine.py", *flags)
    assert outcome.code == 1
    assert "naive, 2 workers, seed 0: process 1 (pid " in outcome.stderr
    assert "was killed by SIGKILL" in outcome.stderr
    assert outcome.stderr.strip().splitlines()[-1].endswith("runs failed; --resume table tries them again")
    rows = json.loads(outcome.stdout)["rows"]
    assert len(rows[0]["test"]["values"]) == 1
    assert rows[1]["failed"][0]["seed"] == 0
    assert rows[1]["diverged"] is False


def test_worker_counts_draw_error_against_global_batch(scalewise, tmp_path):
    write_task(tmp_path, "print('hello from the model')")
    outcome = scalewise("compare", "mine.py", "--workers", "4,1,2", "--seeds", 2, "--jobs", 1, "--json")
    document = outcome.json
    assert [(row["name"], row["workers"]) for row in document["rows"]] == [
        (name, workers) for name in ("naive", "auto") for workers in (1, 2, 4)
    ]
    assert [point["global_batch"] for point in document["curve"][0]["points"]] == [8, 16, 32]
    error = document["curve"][1]["points"][2]["error"]
    assert error == pytest.approx(1 - document["rows"][5]["test"]["mean"])
    assert document["rows"][0]["difference"] is None  # it is the reference: one worker
    assert document["rows"][1]["difference"] is not None
    assert "Test error against global batch" in outcome.stderr
    assert "hello" not in outcome.stderr
    assert "hello" in (tmp_path / document["run"] / "process-1.log").read_text()


def test_learning_rates_are_tuned_on_held_out_data(scalewise, tmp_path):
    flags = ["--workers", 8, "--rows", "single,lr-scaled", "--lr", 0.3, "--epochs", 20, "--seeds", 1, "--jobs", 1]
    outcome = scalewise("compare", "linear", *flags, "--tune", 2, "--hold-out", "--out", "table", "--json")
    tuned = outcome.json["tuned"]
    assert (tuned["budget"], tuned["seed"]) == (2, 0)
    single, scaled = tuned["rows"]
    assert [trial["multiple"] for trial in single["trials"]] == pytest.approx([1, 10**0.5])
    assert single["trials"][0]["validation"] < 0.5
    assert single["lr"] == 0.3
    assert scaled["trials"][1] == {"multiple": pytest.approx(10**0.5), "lr": None, "validation": None}  # diverged
    assert outcome.json["rows"][0]["lr"] == 0.3
    trial = tmp_path / "table" / "tune-single-1w-x1"
    run = json.loads((trial / "result.json").read_text())
    assert run["samples"] == pytest.approx(20 * 1440, abs=20)  # of 1,600, a tenth is held out
    assert json.loads((trial / "recipe.json").read_text())["hold_out"] is True
    assert outcome.json["curves"][0]["validation"] is not None
    diverged = outcome.json["rows"][1]
    assert (diverged["diverged"], diverged["test"]["mean"], diverged["lr"]) == (True, None, 2.4)
    assert "must stay finite" in diverged["failed"][0]["reason"]
    assert "diverged" in outcome.stderr


def test_a_metric_that_is_lower_when_better(scalewise):
    flags = ["--workers", 2, "--steps", 2, "--seeds", 2, "--rows", "single,naive,batch-norm", "--jobs", 1]
    outcome = scalewise("compare", "chars", *flags, "--json")
    assert outcome.json["metric"] == {"name": "bits_per_character", "higher_is_better": False}
    assert outcome.json["skipped"][0]["name"] == "batch-norm"
    assert "no setting bn" in outcome.json["skipped"][0]["reason"]
    assert "left out" in outcome.stderr
    assert "in points" not in outcome.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits", "--rows", "single,nave"], ["single, naive, batch-norm, lr-scaled", "got nave"]),
        (["digits", "--workers", "2,x"], ["--workers", "2,x"]),
        (["digits", "--workers", "0"], ["--workers", "at least 1"]),
        (["digits", "--seeds", "0"], ["--seeds must be at least 1", "got 0"]),
        (["digits", "--batch-norm", "ghost:5"], ["ghost:5", "divide"]),
        (["mine.py"], ["labels must be 0 to 1", "got 7"]),
    ],
)
def test_mistakes_are_one_line_and_exit_2(scalewise_here, tmp_path, arguments, words):
    write_task(tmp_path)
    text = (tmp_path / "mine.py").read_text().replace("return sw.Task", "y[5] = 7\n    return sw.Task")
    (tmp_path / "mine.py").write_text(text)
    outcome = scalewise_here("compare", *arguments, "--jobs", 1, "--quiet")
    assert outcome.code == 2, outcome.stderr
    assert outcome.stdout == ""
    assert len(outcome.stderr.strip().splitlines()) == 1, outcome.stderr
    for word in words:
        assert word in outcome.stderr
    assert not [*tmp_path.glob("runs/*")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tune": 3}, "--tune needs validation data .*validation=.* --hold-out"),
        ({"resume": "nowhere"}, "nowhere must be the folder of a comparison"),
        ({"resume": "auto", "set": ["norm=true"]}, "no setting 'norm'"),
        ({"rows": "batch-norm", "set": ["bn=true"]}, "none of the rows can be run: batch-norm: batch norm is over 32"),
    ],
)
def test_mistakes_that_need_the_task_are_found_before_anything_is_written(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=words):
        compare("digits", **options)
    assert not [*tmp_path.iterdir()]


def test_compare_does_not_take_part_in_a_torchrun_job(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="without torchrun"):
        compare("digits")


def run_here(tmp_path: Path, recipe: Recipe, settings: tuple[str, ...] = (), **changes: bool) -> Outcome:
    line = Line("naive", recipe.workers, RowPlan(recipe, settings, ""))
    setup = Setup("linear", None, tmp_path, changes.get("hold_out", False), "cpu", None)
    outcome = perform(Job(line, 0), sw.load_task("linear", settings), setup, lambda progress: None, Stop())
    assert isinstance(outcome, Outcome)
    return outcome


def test_a_run_that_diverged_is_not_tried_again_but_others_are(tmp_path):
    recipe = Recipe(workers=2, worker_batch=20, optimizer="sgd", lr=9.0, epochs=10.0, threads=1)
    first = run_here(tmp_path, recipe)
    assert first.failure is not None
    assert (first.failure.diverged, first.stored) == (True, False)
    again = run_here(tmp_path, recipe)
    assert (again.failure, again.stored) == (first.failure, True)
    file = tmp_path / "naive-2w-seed0" / "failure.json"
    file.write_text(json.dumps({"reason": "killed", "exit_code": 1, "diverged": False}))
    assert run_here(tmp_path, recipe).stored is False


def test_a_run_of_another_recipe_is_refused(tmp_path):
    recipe = Recipe(workers=2, worker_batch=20, lr=0.01, steps=2, threads=1)
    assert run_here(tmp_path, recipe).result is not None
    other = run_here(tmp_path, recipe.replace(lr=0.02))
    assert other.failure is not None
    assert other.failure.exit_code == 2
    assert "lr=0.01" in other.failure.reason


def test_held_out_data_stay_held_out_when_the_run_is_resumed(tmp_path, scalewise):
    recipe = Recipe(workers=1, worker_batch=20, lr=0.01, epochs=1.0, threads=1)
    assert run_here(tmp_path, recipe, hold_out=True).result["validation"] is not None
    more = scalewise("train", "linear", "--resume", tmp_path / "naive-1w-seed0", "--epochs", 2, "--json").json
    assert (more["steps"], more["validation"] is not None) == (144, True)


def test_the_facts_of_a_task():
    task = sw.load_task("digits", ["bn=true"])
    known = facts(task, "digits", ("bn=true",), task.recipe)
    assert (known.samples, known.has_batch_norm, known.takes_bn) == (1437, True, True)
    plain = facts(sw.load_task("linear"), "linear", (), task.recipe)
    assert (plain.has_batch_norm, plain.takes_bn) == (False, False)


def test_holding_out_is_an_argument_of_the_training():
    task = sw.load_task("linear")
    with Training(task, Recipe(threads=1), sw.Placement(), hold_out=True) as training:
        assert (len(training.samples), len(training.validation or [])) == (1440, 160)
    with Training(task, Recipe(threads=1), sw.Placement()) as training:
        assert (len(training.samples), training.validation) == (1600, None)
