"""The command as a person or a script meets it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from conftest import environment
from scalewise import records
from test_resume import start, wait_for

KEYS = {
    "run", "task", "workers", "processes", "threads", "worker_batch", "global_batch", "steps", "epochs", "samples",
    "optimizer", "lr", "train", "validation", "test", "seconds", "samples_per_second", "exact", "weights_sha256",
    "noise_scale", "derived", "search",
}  # fmt: skip


def test_json_is_the_contract(scalewise, tmp_path):
    outcome = scalewise("train", "digits", "--workers", 4, "--steps", 30, "--seed", 1, "--json")
    result = outcome.json
    assert set(result) == KEYS
    assert result["global_batch"] == result["workers"] * result["worker_batch"] == 128
    assert result["samples"] == 30 * 128
    assert result["lr"] == {"base": 0.02, "peak": 0.08}
    assert set(result["train"]) == set(result["test"]) == {"loss", "accuracy"}
    assert result["validation"] is None
    assert set(result["noise_scale"]) == {"value", "low", "high", "enough"}
    assert [set(value) for value in result["derived"]] == [{"field", "value", "reason"}] * 3
    run = tmp_path / result["run"]
    assert json.loads((run / "result.json").read_text()) == result
    assert {path.name for path in run.iterdir() if not path.name.startswith(".")} == {
        "recipe.json",
        "env.json",
        "metrics.jsonl",
        "checkpoints",
        "result.json",
        "model.safetensors",
        "report.html",
    }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 31))
    assert "auto  lr_rule = linear" in outcome.stderr


def test_quiet_draws_nothing(scalewise):
    outcome = scalewise("train", "linear", "--steps", 3, "--quiet")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "", "")


def test_one_worker_has_no_noise_scale_but_micro_batches_do(scalewise):
    assert scalewise("train", "linear", "--steps", 3, "--json").json["noise_scale"] is None
    assert scalewise("train", "linear", "--steps", 3, "--micro-batch", 5, "--json").json["noise_scale"] is not None


@pytest.mark.parametrize(("task", "metric"), [("mlp", "accuracy"), ("linear", "loss"), ("logistic", "accuracy")])
def test_small_tasks_learn(scalewise, task, metric):
    result = scalewise("train", task, "--json", "--quiet").json
    value = result["test"][metric]
    assert value > 0.9 if metric == "accuracy" else value < 0.3  # linear: the noise's variance is 0.25


def test_chars_learns_more_than_letter_frequencies(scalewise):
    result = scalewise("train", "chars", "--epochs", 0.5, "--threads", 1, "--json", "--quiet").json
    assert result["test"]["bits_per_character"] == pytest.approx(result["test"]["loss"] / 0.6931471805599453, rel=1e-6)
    assert result["test"]["bits_per_character"] < 4.0  # single letters alone take 4.4


def test_a_target_is_reached_or_missed(scalewise):
    reached = scalewise("train", "digits", "--target", 0.6, "--json")
    assert (reached.code, reached.json["target_reached"]) == (0, True)
    assert reached.json["epochs"] < 9
    assert "held out" in reached.stderr
    missed = scalewise("train", "digits", "--target", 0.999, "--epochs", 1, "--json")
    assert (missed.code, missed.json["target_reached"]) == (3, False)
    several = scalewise("train", "digits", "--workers", 2, "--processes", 2, "--target", 0.999, "--epochs", 1, "--json")
    assert (several.code, several.json["target_reached"]) == (3, False)


def test_a_lower_metric_may_be_better(scalewise):
    outcome = scalewise("train", "linear", "--target", 0.3, "--json")
    assert (outcome.code, outcome.json["target_reached"]) == (0, True)


def test_patience_restores_the_best_weights(scalewise):
    result = scalewise("train", "mlp", "--patience", 1, "--lr", 0.3, "--epochs", 20, "--json", "--quiet").json
    assert result["epochs"] < 20
    assert result["best_sha256"] != result["weights_sha256"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "digit"], ["unknown task 'digit'", "did you mean digits?"]),
        (["train", "nowhere.py"], ["nowhere.py", "must exist"]),
        (["train", "no.such:thing"], ["no module named no"]),
        (["train", "scalewise.tasks.digits:nothing"], ["no function 'nothing'"]),
        (["train"], ["TASK", "--help"]),
        (["train", "digits", "--wrkers", "8"], ["--wrkers"]),
        (["train", "digits", "--workers", "many"], ["many", "whole number"]),
        (["train", "digits", "--batch-norm", "foo"], ["worker, sync or ghost:N", "'foo'"]),
        (["train", "digits", "--set", "bn=true", "--batch-norm", "ghost:1"], ["2 samples per group", "raise N of"]),
        (["train", "digits", "--workers", "0"], ["workers", "greater than or equal to 1", "got 0"]),
        (["train", "digits", "--optimizer", "adm"], ["adm"]),
        (["train", "digits", "--workers", "2", "--processes", "3"], ["between 1 and the number of workers (2)", "got 3"]),
        (["train", "digits", "--set", "bn=perhaps"], ["bn=", "true or false", "perhaps"]),
        (["train", "digits", "--set", "norm=true"], ["norm", "bn, dropout"]),
        (["train", "digits", "--set", "bn"], ["name=value"]),
        (["train", "digits", "--set", "bn=true", "--worker-batch", "1"], ["at least 2 samples", "got 1"]),
        (["train", "digits", "--batch-norm", "ghost:5"], ["ghost:5", "divide"]),
        (["train", "digits", "--recipe", "nowhere.json"], ["nowhere.json", "readable"]),
        (["train", "chars", "--label-smoothing", "0.1"], ["label_smoothing"]),
        (["train", "digits", "--shard-optimizer", "--reduce", "server"], ["--shard-optimizer", "ordered"]),
        (["train", "digits", "--optimizer", "muon", "--shard-optimizer"], ["muon", "drop --shard-optimizer"]),
        (["train", "digits", "--optimizer", "soap", "--shard-optimizer"], ["soap", "drop --shard-optimizer"]),
        (["train", "digits", "--optimizer", "schedule-free", "--beta1", "0"], ["beta1 above 0, got 0", "--beta1 0.9"]),
        (["train", "digits", "--device", "cuda"], ["cuda", "not available"]),
        (["train", "digits", "--data", "somewhere"], ["takes no --data", "bn, dropout"]),
        (["train", "digits", "--loaders", "-1"], ["loaders must be at least 0", "got -1"]),
        (["train", "images"], ["needs a value for 'folder'", "--set folder="]),
        (["dance"], ["dance"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_exit_2(scalewise_here, tmp_path, arguments, words):
    outcome = scalewise_here(*arguments)
    assert outcome.code == 2, outcome.stderr
    assert outcome.stdout == ""
    assert len(outcome.stderr.strip().splitlines()) == 1, outcome.stderr
    for word in words:
        assert word in outcome.stderr
    assert not (tmp_path / "runs").exists()


def test_mistakes_look_alike_in_a_process_of_their_own(scalewise, scalewise_here):
    mistake = ["train", "digits", "--workers", "0"]
    assert scalewise(*mistake) == scalewise_here(*mistake)


USER_TASK = """
    import torch
    from torch.nn import functional as F
    import scalewise as sw

    class Model(torch.nn.Linear):
        def forward(self, x):
            {body}
            return super().forward(x)

    def task(samples: int = 100, bad: int = -1, label: int = 1, validate: bool = False) -> sw.Task:
        x, y = torch.randn(samples, 3), torch.zeros(samples, dtype=torch.long)
        y[9] = label
        if bad >= 0:
            x[bad] = float("nan")
        validation = (x, y) if validate else None
        return sw.Task(
            model=lambda: Model(3, 2), train=(x, y), test=(x, y), validation=validation, loss=F.cross_entropy
        )
"""


def write_task(tmp_path, body: str = "pass"):
    (tmp_path / "mine.py").write_text(textwrap.dedent(USER_TASK).format(body=body))


def test_a_users_task_from_a_file_and_from_a_module(scalewise, tmp_path):
    write_task(tmp_path)
    assert scalewise("train", "mine.py", "--set", "samples=50", "--steps", 2, "--json").json["task"] == "mine"
    assert scalewise("train", "mine:task", "--steps", 2, "--json").json["steps"] == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_a_users_error_shows_the_users_frames_only(scalewise, tmp_path, processes):
    write_task(tmp_path, "raise KeyError('my own mistake')")
    outcome = scalewise("train", "mine.py", "--workers", 2, "--processes", processes)
    assert outcome.code == 1
    assert "my own mistake" in outcome.stderr
    assert "mine.py:8" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "site-packages" not in outcome.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_finite_names_step_worker_and_samples(scalewise, tmp_path, processes):
    write_task(tmp_path, "x = torch.where(x[:, :1] == x[7, 0], x / 0, x) if self.training else x")
    flags = ["--workers", 4, "--worker-batch", 25, "--steps", 2, "--processes", processes]
    outcome = scalewise("train", "mine.py", *flags)
    assert outcome.code == 1
    message = outcome.stderr.strip().splitlines()[-1]
    assert "loss must stay finite, got nan at step 1 on worker 0 (training samples " in message
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("processes", [1, 2])
def test_data_that_are_not_finite_name_the_sample(scalewise, tmp_path, processes):
    write_task(tmp_path)
    flags = ["--workers", 4, "--worker-batch", 5, "--epochs", 2, "--processes", processes, "--set", "bad=7"]
    outcome = scalewise("train", "mine.py", *flags)
    assert outcome.code == 1
    assert (
        outcome.stderr.strip()
        .splitlines()[-1]
        .startswith("scalewise: training samples must hold finite numbers, got nan in sample 7;")
    )


def test_the_last_good_checkpoint_stays_when_the_loss_does_not(scalewise, tmp_path):
    outcome = scalewise("train", "linear", "--lr", 3, "--epochs", 1000, "--checkpoint-steps", 1, "--out", "run")
    assert outcome.code == 1
    assert "must stay finite" in outcome.stderr
    newest = max(int(path.name.split("-")[1]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    again = scalewise("train", "linear", "--resume", "run", "--steps", newest, "--json")
    assert again.json["steps"] == newest > 10


@pytest.mark.parametrize(("label", "where", "processes"), [(2, "got 2 at sample 9", 2), (-1, "got -1 at sample 9", 1)])
def test_labels_without_an_output_are_refused(scalewise, tmp_path, label, where, processes):
    write_task(tmp_path)
    flags = ["--set", f"label={label}", "--workers", 2, "--processes", processes]
    outcome = scalewise("train", "mine.py", *flags)
    assert outcome.code == 2
    assert f"training labels must be 0 to 1, since the model has 2 outputs, {where};" in outcome.stderr
    assert not (tmp_path / "runs").exists()


def test_labels_that_are_to_be_ignored_are_not_refused(scalewise, tmp_path):
    write_task(tmp_path)
    assert scalewise("train", "mine.py", "--set", "label=-100", "--steps", 2).code == 0


def test_a_read_only_folder_is_refused(scalewise, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o555)
    outcome = scalewise("train", "linear", "--steps", 1, "--out", "closed/run")
    assert outcome.code == 2
    assert "closed is no writable folder" in outcome.stderr
    assert not list((tmp_path / "closed").iterdir())


@pytest.mark.parametrize(
    ("way", "words"), [("os._exit(7)", "ended with exit code 7"), ("os.kill(os.getpid(), 11)", "killed by SIGSEGV")]
)
def test_the_last_lines_of_a_process_that_died_are_shown(scalewise, tmp_path, way, words):
    write_task(tmp_path, f"import os; os.environ['RANK'] == '1' and (print('I feel unwell'), {way})")
    outcome = scalewise("train", "mine.py", "--workers", 2, "--processes", 2, "--max-restarts", 0)
    assert outcome.code == 1
    *_, message, last = outcome.stderr.strip().splitlines()
    assert f"process 1 {words}" in message.replace("was ", "")
    assert last == "  I feel unwell"


def test_an_undeclared_buffer_is_refused(scalewise, tmp_path):
    (tmp_path / "models.py").write_text(
        (pytest.importorskip("pathlib").Path(__file__).parent / "models.py").read_text()
    )
    outcome = scalewise("train", "models:counting", "--set", "declared=false", "--workers", 2, "--processes", 1)
    assert outcome.code == 2
    assert "buffer 'seen' changed during training" in outcome.stderr


@contextlib.contextmanager
def endless(tmp_path, processes: int):
    """A run that does not end by itself, and its child processes; afterwards none of them may be alive."""
    flags = ["--workers", "2", "--epochs", "10000", "--processes", str(processes), "--out", "run"]
    process = start(tmp_path, "train", "digits", *flags, *(["--max-restarts", "0"] if processes > 1 else []))
    wait_for(lambda: (tmp_path / "run" / "checkpoints").exists(), process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == (processes + 1 if processes > 1 else 0)  # with the one from which they are forked
    yield process, children
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_everything(tmp_path, processes, number, code):
    with endless(tmp_path, processes) as (process, _):
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code, stderr
        assert "Traceback" not in stderr
        last = stderr.strip().splitlines()[-1]
        step = int(last.split("after step ")[1].split(";")[0])
        assert f"{number.name} stopped the run" in last
        assert "--resume run" in last
        assert (tmp_path / "run" / "checkpoints" / f"step-{step}").is_dir()
        recorded = [line["step"] for line in records.read(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "step"]
        assert recorded == list(range(1, step + 1))


@pytest.mark.parametrize("flags", [["--workers", "2.5"], ["--steps", "3.7"], ["--micro-batch", "many"]])
def test_whole_numbers_are_not_rounded(scalewise_here, flags):
    outcome = scalewise_here("train", "digits", *flags)
    assert (outcome.code, outcome.stderr.count("\n")) == (2, 1)
    assert f"{flags[0]}: must be a whole number, got {flags[1]}" in outcome.stderr


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_counts_where_an_import_makes_another_error_of_it(scalewise, tmp_path, name, code):
    (tmp_path / "unlucky.py").write_text(
        "import os, signal\ntry:\n"
        f"    os.kill(os.getpid(), signal.{name})\n    signal.pause()\n"
        "except BaseException as error:\n    raise ImportError('as numpy says of its parts') from error\n"
    )
    done = scalewise("train", "unlucky.py")
    assert (done.code, done.stderr.count("\n")) == (code, 1)


def test_a_process_that_dies_is_named(tmp_path):
    with endless(tmp_path, 2) as (process, children):
        next(child for child in children if child.name() == "scalewise-1").kill()
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "process 1 was killed by SIGKILL" in stderr
        assert "--resume" in stderr
        assert "Traceback" not in stderr


def test_nothing_outlives_a_launcher_that_was_killed(tmp_path):
    with endless(tmp_path, 2) as (process, children):
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        process.communicate()


def test_taking_part_in_a_torchrun_job(torchrun, scalewise):
    flags = ["train", "digits", "--workers", 4, "--steps", 5, "--json", "--quiet"]
    job = torchrun(2, "-m", "scalewise", *flags)
    assert job.code == 0, job.stderr
    result = json.loads(job.stdout)
    assert result["processes"] == 2
    assert result["weights_sha256"] == scalewise(*flags, "--processes", 1).json["weights_sha256"]


def test_a_recipe_file_is_loaded_and_flags_win(scalewise, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"workers": 2, "worker_batch": 8, "lr": 0.3, "steps": 2}))
    result = scalewise("train", "digits", "--recipe", "recipe.json", "--lr", 0.1, "--processes", 1, "--json").json
    assert (result["workers"], result["lr"]["peak"], result["steps"]) == (2, 0.1, 2)


def test_a_runs_own_recipe_can_be_used_again(scalewise):
    one = ("--processes", 1, "--json", "--quiet")
    first = scalewise("train", "digits", "--workers", 2, "--steps", 3, "--out", "run", *one).json
    again = scalewise("train", "digits", "--recipe", "run/recipe.json", *one).json
    assert again["weights_sha256"] == first["weights_sha256"]


def test_an_output_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "errors.csv").write_text("samples,error\n100,0.5\n200,0.4\n400,0.33\n800,0.27\n1600,0.23\n")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "scalewise", "forecast", "errors.csv", "--quiet", "--json"],
            cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "scalewise: the output could not be written: No space left on device; free disk space and start again"
    ]


def test_what_a_task_prints_is_not_on_stdout(scalewise, tmp_path):
    write_task(tmp_path, "print('hello from the model')")
    outcome = scalewise("train", "mine.py", "--steps", 2, "--json")
    assert outcome.json["steps"] == 2
    assert "hello from the model" in outcome.stderr


def test_two_runs_at_once_have_folders_of_their_own(tmp_path):
    both = [start(tmp_path, "train", "linear", "--steps", "5", "--json", "--quiet") for _ in range(2)]
    runs = {json.loads(process.communicate(timeout=60)[0])["run"] for process in both}
    assert len(runs) == 2


def test_the_process_that_failed_is_heard_not_those_that_lost_contact(scalewise, tmp_path):
    write_task(tmp_path, "if __import__('os').environ['RANK'] == '1': raise KeyError('bad file')")
    outcome = scalewise("train", "mine.py", "--workers", 2, "--processes", 2)
    assert outcome.code == 1
    assert "bad file" in outcome.stderr
    assert "gloo" not in outcome.stderr


def test_a_full_disk_is_one_line(tmp_path):
    command = f"ulimit -f 16; exec {sys.executable} -m scalewise train digits --steps 5 --out run"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_little_memory_is_one_line_with_what_to_do(tmp_path):
    command = f"ulimit -d 700000; exec {sys.executable} -m scalewise train digits --worker-batch 1400 --set bn=true"
    many = " --workers 40 --recipe plain --processes 1 --batch-norm sync --steps 1 --out run"
    done = subprocess.run(["bash", "-c", command + many], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("scalewise: a step must fit into memory, got: ")
    assert "--micro-batch" in last


def test_a_full_disk_in_the_records_is_one_line(tmp_path):
    (tmp_path / "small").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", "small"], cwd=tmp_path, check=False)
    if mounted.returncode:
        pytest.skip("no permission to mount a small disk")
    try:
        command = [sys.executable, "-m", "scalewise", "train", "linear", "--epochs", "100000", "--out", "small/run"]
        done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["umount", "small"], cwd=tmp_path, check=True)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("scalewise: ")
    assert "Traceback" not in done.stderr


def test_patience_added_on_resume_restores_the_best_weights(scalewise, tmp_path):
    write_task(tmp_path)
    first = scalewise("train", "mine.py", "--set", "validate=true", "--lr", 0, "--epochs", 3, "--out", "run", "--json")
    assert "best_sha256" not in first.json
    flags = ["--set", "validate=true", "--resume", "run", "--epochs", 9, "--patience", 1]
    result = scalewise("train", "mine.py", *flags, "--json").json
    assert result["steps"] == first.json["steps"]  # nothing was better for longer than that already
    assert result["best_sha256"] == result["weights_sha256"]


def test_compiling_without_a_compiler_falls_back_with_a_notice(tmp_path):
    command = [sys.executable, "-m", "scalewise", "train", "mlp", "--compile", "--steps", "2", "--json"]
    hidden = {name: value for name, value in environment().items() if name != "CXX"} | {"PATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    derived = {value["field"]: value for value in json.loads(done.stdout)["derived"]}
    assert derived["compile"]["value"] is False
    assert "compile = False" in done.stderr


def test_compile_gives_one_hash_too(scalewise, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of compiling processes that import torch
    flags = ["train", "mlp", "--workers", 2, "--steps", 2, "--compile", "--json", "--quiet"]
    found = {scalewise(*flags, "--processes", processes).json["weights_sha256"] for processes in (1, 2)}
    assert len(found) == 1


def test_python_is_the_one_that_was_asked(scalewise):
    assert scalewise("--version").stdout.strip() == __import__("scalewise").__version__
    assert sys.version_info >= (3, 11)
