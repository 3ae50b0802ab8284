"""Horovod's interfaces: jobs of several processes that hold many assertions each, and what needs one process only."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scalewise.horovod
from conftest import environment, launched, together
from scalewise.errors import UsageError

JOBS = Path(__file__).parent / "jobs"
EXAMPLES = Path(__file__).parents[1] / "examples"


def checks_of(job: str) -> set[str]:
    text = (JOBS / job).read_text()
    return {line.split("def ")[1].split("(")[0] for line in text.splitlines() if line.startswith("def check_")}


@pytest.mark.parametrize("processes", [2, 3])
def test_collectives(tmp_path, processes):
    outcome = together(tmp_path, processes, JOBS / "horovod_collectives.py")
    assert outcome.code == 0, outcome.stderr
    assert {*outcome.stdout.split()} == checks_of("horovod_collectives.py")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What the training job says on 1 (the ordered sum alone), 2 and 3 processes."""
    said = {}
    for processes, arguments in ((1, ["ordered"]), (2, ["watch"]), (3, [])):
        folder = tmp_path_factory.mktemp("trained")
        outcome = together(folder, processes, JOBS / "horovod_training.py", *arguments)
        assert outcome.code == 0, outcome.stderr
        said[processes] = outcome.stdout
    return said


def test_training_equals_that_of_one_process(trained):
    for processes in (2, 3):
        assert checks_of("horovod_training.py") <= {*trained[processes].split()}


def test_the_ordered_sum_has_the_same_bytes_on_1_2_and_3_processes(trained):
    digests = {said.split("digest ")[1].split()[0] for said in trained.values()}
    assert len(digests) == 1


def test_doctor_finds_same_data_and_a_forgotten_broadcast(trained):
    assert json.loads(trained[2].split("findings ")[1].splitlines()[0]) == ["same-data", "replicas-drifted"]


def test_an_elastic_training_goes_on_after_a_process_was_killed(tmp_path):
    results = []
    for name in ("calm", "kill"):
        done = launched(tmp_path, 2, JOBS / "horovod_elastic.py", name, name, restarts=1)
        assert done.code == 0, done.stderr
        results.append(json.loads((tmp_path / name / "result.json").read_text()))
    calm, killed = results
    assert (calm["resets"], killed["resets"]) == ([], [2])
    assert (calm["begun"], killed["begun"]) == (0, 1), "a sampler of torch's own knows its epoch"
    assert sorted(calm["seen"]) == sorted([*range(48)] * 2), "every sample once an epoch"
    assert killed["seen"] == calm["seen"]
    assert killed["digest"] == calm["digest"], "the same bytes as without the loss"
    assert not [*(tmp_path / ".scalewise-elastic").iterdir()], "nothing is left of a job that has ended"


def test_a_torch_program_in_horovods_style(torchrun, tmp_path, scalewise):
    outcome = torchrun(2, EXAMPLES / "horovod_mnist.py", "--watch", "watch")
    assert outcome.code == 0, outcome.stderr
    assert float(outcome.stdout.split("test accuracy ")[1]) > 0.85
    assert scalewise("doctor", tmp_path / "watch", "--json").json["findings"] == []


@pytest.mark.heavy
def test_the_lectures_program_on_keras(torchrun, tmp_path, scalewise):
    outcome = torchrun(2, EXAMPLES / "horovod_keras.py", "watch")
    assert outcome.code == 0, outcome.stderr
    assert float(outcome.stdout.split("test accuracy ")[1].split(",")[0]) > 0.9
    rates = json.loads(outcome.stdout.split("learning rates ")[1].splitlines()[0])
    assert rates == pytest.approx([0.002 * (1 + epoch / 3) for epoch in (1, 2, 3)] + [0.004, 0.004, 0.0004])
    found = scalewise("doctor", tmp_path / "watch", "--json").json["findings"]
    assert not [one["cause"] for one in found if one["cause"] in ("same-data", "replicas-drifted", "non-finite")]


@pytest.mark.heavy
def test_keras_on_two_processes(tmp_path):
    outcome = together(tmp_path, 2, JOBS / "horovod_keras.py")
    assert outcome.code == 0, outcome.stderr
    assert {*outcome.stdout.split()} == checks_of("horovod_keras.py")


ALONE = """
import torch, scalewise.horovod.torch as hvd
for before in (hvd.rank, hvd.global_process_set.size, lambda: hvd.allreduce(torch.ones(1))):
    try:
        before()
        raise SystemExit("asked before init()")
    except ValueError as error:
        assert "use hvd.init()" in str(error)
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (0, 1, 0, 1, 1)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert hvd.allreduce(torch.ones(2)).tolist() == [1, 1] and hvd.join() == 0
"""


def test_one_process_without_a_launcher():
    done = subprocess.run([sys.executable, "-c", ALONE], env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("tensorflow", "KERAS_BACKEND=torch"),
        ("mxnet", "torch"),
        ("spark", "TorchDistributor"),
        ("ray", "TorchTrainer"),
        ("runner.launch", "torchrun"),
    ],
)
def test_what_is_not_supported_names_the_way_out(name, way_out):
    with pytest.raises(ImportError, match=way_out):
        importlib.import_module(f"scalewise.horovod.{name}")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("scalewise.horovod.nothing")


def test_keras_missing_is_one_line():
    code = "import sys; sys.modules['keras'] = None; import scalewise.horovod.keras"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    assert "pip install 'scalewise[keras]'" in done.stderr.splitlines()[-1]


def returns_rank(base: int, step: int = 1) -> int:
    import scalewise.horovod.torch as hvd

    hvd.init()
    return int(hvd.allreduce(torch.tensor([base + step * hvd.rank()]), op=hvd.Sum))


def test_run_calls_a_function_in_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    before = signal.getsignal(signal.SIGINT)
    assert scalewise.horovod.run(returns_rank, args=(10,), kwargs={"step": 2}, num_proc=2) == [22, 22]
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ValueError, match="this machine only"):
        scalewise.horovod.run(returns_rank, args=(1,), host_discovery_script="hosts.sh")
    with pytest.raises(UsageError, match="top level of a file"):
        scalewise.horovod.run(lambda: 1)
    with pytest.raises(RuntimeError, match="ends on every process"):
        scalewise.horovod.run(returns_rank, args=("no number",), np=1, hosts="localhost:2")
    with pytest.raises(ValueError, match="this machine only"):
        scalewise.horovod.run(returns_rank, args=(1,), hosts="elsewhere:2")


def test_names_are_where_scripts_import_them_from():
    from scalewise.horovod.common import elastic, exceptions, process_sets, util
    from scalewise.horovod.torch import elastic as ours
    from scalewise.horovod.torch import mpi_ops

    assert issubclass(ours.TorchState, elastic.ObjectState)
    assert mpi_ops.HorovodInternalError is exceptions.HorovodInternalError
    assert mpi_ops.global_process_set is process_sets.global_process_set
    assert (util.gloo_built(), util.mpi_built(verbose=True), util.num_rank_is_power_2(6)) == (True, False, False)
    home = os.environ["HOME"]
    with pytest.raises(KeyError), util.env(SCALEWISE_TEST="1", HOME="elsewhere", PATH=None):
        raise KeyError(os.environ["SCALEWISE_TEST"] + os.environ["HOME"] + os.environ["PATH"])
    assert ("SCALEWISE_TEST" in os.environ, os.environ["HOME"]) == (False, home)


def test_threads_of_the_launcher():
    from scalewise.horovod.runner.util.threads import in_thread

    told: list[int] = []
    in_thread(told.append, (3,)).join()
    in_thread(int, ("no number",), silent=True).join()
    assert told == [3]
    with pytest.raises(ValueError, match="tuple"):
        in_thread(told.append, 3)


def test_a_state_that_no_file_can_be_made_of_says_what_is_missing():
    from scalewise.horovod.common.elastic import State

    with pytest.raises(NotImplementedError, match=r"saved\(\) and load\(\)"):
        State(bcast_object=None, get_rank=None).saved()
