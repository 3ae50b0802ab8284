"""Every kind of parallelism: the same losses as one process, the same bytes where that is promised, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import scalewise as sw
from conftest import together
from scalewise.engine.parallel.fsdp import refuse_scalars
from scalewise.engine.parallel.stages import balanced, split
from scalewise.engine.parallel.tensor import plan
from scalewise.errors import PlacementError, TaskError
from scalewise.present import terminal
from scalewise.present.stored import Stored
from scalewise.present.stories.bench import benching_story
from scalewise.runs.bench.parallelism import ParallelismReport, Row
from scalewise.runs.bench.payload import KINDS, PLACES

pytestmark = pytest.mark.timeout(900)  # for the one that starts the jobs
JOB = Path(__file__).parent / "jobs" / "parallel.py"
BYTES = 32_768  # of models.whole_chunks
ACTIVATIONS = 4 * 2 * 4 * 64 * 4  # workers × micro batches × samples × width × bytes

# No chain of layers: what it computes is more than its children in turn.
BRANCHED = """
import os, signal
import scalewise as sw
from scalewise.tasks.digits import load
from torch import nn
from torch.nn import functional as F

class Branched(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(64, 10), nn.Linear(64, 10)
    def forward(self, x):
        x = x.flatten(1)
        return self.left(x) + self.right(x)

def task():
    train, test = load()
    return sw.Task(model=Branched, train=train, test=test, loss=F.cross_entropy)
"""
# The second process dies in its third pass.
DYING = BRANCHED.replace(
    "        return self.left(x)",
    """
        if os.environ.get("RANK") == "1" and type(self).__name__.startswith("FSDP"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.left(x)""",
)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[int, dict]:
    """What two and four processes gave, each beside one process alone."""
    few = {2: [], 4: ["mlp", "bytes, lamb", "bytes, adascale"]}
    return {count: _job(tmp_path_factory.mktemp("job"), count, names) for count, names in few.items()}


def _job(folder: Path, processes: int, names: list[str]) -> dict:
    outcome = together(folder, processes, JOB, *names)
    assert outcome.code == 0, outcome.stderr[-4000:]
    return json.loads(outcome.stdout.splitlines()[-1])


def _runs(jobs: dict[int, dict], processes: int) -> list[tuple[str, dict, dict]]:
    """Every run on several processes beside that of one."""
    alone = jobs[processes]["alone"]
    return [(name, run, alone[name.rpartition(" (")[0]]) for name, run in jobs[processes]["runs"].items()]


@pytest.mark.parametrize("processes", [2, 4])
def test_losses_are_those_of_one_process(jobs, processes):
    for name, run, alone in _runs(jobs, processes):
        if not name.startswith("dropout"):
            close = 1e-9 if not name.startswith("bytes") else 0.0
            assert run["losses"] == pytest.approx(alone["losses"], rel=close, abs=0), name
            assert run["test"] == pytest.approx(alone["test"], rel=max(close, 1e-12)), name
            assert run["norms"] == pytest.approx(alone["norms"], rel=1e-5), name


@pytest.mark.parametrize("processes", [2, 4])
def test_what_says_it_is_exact_has_the_bytes_of_one_process(jobs, processes):
    for name, run, alone in _runs(jobs, processes):
        if run["exact"]:
            assert run["sha256"] == alone["sha256"], name
        assert run["exact"] or not name.startswith("bytes"), name


def test_exactness_is_not_claimed_where_it_cannot_be(jobs):
    runs = jobs[2]["runs"]
    inexact = {name for name, run in runs.items() if not run["exact"]}
    for name in ("clipped (tensor)", "adascale (tensor)", "mlp (tensor)", "dropout (pipeline)"):
        assert name in inexact
    assert runs["dropout (pipeline)"]["losses"] != jobs[2]["alone"]["dropout"]["losses"]


def test_fsdp_and_the_sharded_optimizer_hold_less(jobs):
    alone = jobs[2]["alone"]["chars"]["held"]
    for parameters, _, state in jobs[2]["runs"]["chars (fsdp)"]["held"]:
        assert parameters + state <= 0.6 * (alone[0] + alone[2])
    alone = jobs[2]["alone"]["bytes, tokens"]["held"]
    for _, _, state in jobs[2]["runs"]["bytes, tokens (sharded)"]["held"]:
        assert state <= 0.55 * alone[2]


@pytest.mark.parametrize("processes", [2, 4])
def test_payload_is_counted_exactly(jobs, processes):
    moved = jobs[processes]["payloads"]
    part, others = BYTES // processes, processes - 1
    for process in moved:
        ring = [2 * others * part] * 2
        assert process["data"]["gradients"] == ring
        assert process["allreduce"]["gradients"] == ring
        assert process["sharded"]["gradients"] == process["sharded"]["parameters"] == [others * part] * 2
        assert process["fsdp"]["gradients"] == [(4 // processes) * others * part] * 2  # once for every worker
        assert process["fsdp"]["parameters"] == [(4 // processes) * 4 * others * part] * 2  # two passes, to and fro
    server, *clients = [process["server"] for process in moved]
    assert server["gradients"] == [0, others * BYTES]
    assert server["parameters"] == [others * BYTES, 0]
    for client in clients:
        assert (client["gradients"], client["parameters"]) == ([BYTES, 0], [0, BYTES])


def test_a_pipeline_moves_activations_and_their_gradients(jobs):
    first, second = [process["pipeline"] for process in jobs[2]["payloads"]]
    assert (first["activations"], first["activation_gradients"]) == ([ACTIVATIONS, 0], [0, ACTIVATIONS])
    assert (second["activations"], second["activation_gradients"]) == ([0, ACTIVATIONS], [ACTIVATIONS, 0])
    assert "gradients" not in first


def test_a_run_can_change_its_parallelism(jobs):
    chains = jobs[2]["chains"]
    assert chains["changing"] == chains["unbroken"]
    assert chains["changing"]["exact"]
    assert not chains["tensor"]["exact"]
    assert chains["tensor"]["loss"] == pytest.approx(chains["mlp"]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice (pipeline)", "its step called it twice: use --parallel fsdp"),
        ("part (pipeline)", "its step calls a part of the model, or nothing of it: use --parallel data"),
        ("penalty (pipeline)", "nothing with the model but call it; split, it computes something else (off by 100%)"),
        ("peeks (tensor)", "--parallel tensor needs pairs of layers"),
        ("peeks (tensor)", "split, it computes something else (off by "),
        ("penalty (fsdp)", "as by a penalty on weights (RuntimeError: "),
    ],
)
def test_what_would_be_computed_wrongly_in_parts_is_refused(jobs, name, message):
    assert message in jobs[2]["refused"][name]


class Wrapped(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*layers), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def _linears(*widths: int) -> list[nn.Module]:
    pairs = zip(widths, widths[1:], strict=False)
    return [layer for inputs, outputs in pairs for layer in (nn.Linear(inputs, outputs), nn.ReLU())]


def test_stages_are_cut_by_cost_and_make_the_model():
    model = nn.Sequential(nn.Flatten(), *_linears(8, 8, 8, 64, 64))
    x = torch.randn(4, 2, 4)
    stages, flows = split(model, x, 2)
    assert [sum(1 for layer in stage if isinstance(layer, nn.Linear)) for stage in stages] == [3, 1]
    assert torch.equal(stages[1](stages[0](x)), model(x))
    assert [flow.shape for flow in flows] == [(4, 2, 4), (4, 64), (4, 64)]
    assert balanced([3.0, 1.0, 1.0, 1.0], 2) == [(0, 1), (1, 4)]


def test_children_in_turn_are_a_chain_if_they_make_the_model():
    stages, _ = split(Wrapped(*_linears(4, 4, 4)), torch.randn(3, 4), 3)
    assert len(stages) == 3


def test_a_model_that_is_no_chain_is_refused():
    model = Wrapped(*_linears(4, 4))
    model.forward = lambda x: model.head(model.body(x) + x)  # type: ignore[method-assign]
    with pytest.raises(TaskError, match="called in turn, do not give what it gives: add stages"):
        split(model, torch.randn(3, 4), 2)
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(TaskError, match="do not hold 'scale'"):
        split(model, torch.randn(3, 4), 2)


def test_more_stages_than_layers_and_shared_layers_are_refused():
    with pytest.raises(PlacementError, match="got 2 layers for 3 processes; lower --processes to 2"):
        split(nn.Sequential(*_linears(4, 4, 4)), torch.randn(3, 4), 3)
    layer = nn.Linear(4, 4)
    with pytest.raises(TaskError, match="two stages share a parameter"):
        split(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(3, 4), 2)


def test_which_matrices_are_split():
    drop = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Dropout(0.1), nn.Linear(4, 3))
    assert {name: type(style).__name__ for name, style in plan(drop, 2).items()} == {
        "0": "ColwiseParallel",
        "2": "RowwiseParallel",
    }
    model = sw.load_task("chars").model()
    found = plan(model, 2)
    assert type(found["blocks.0.mlp.2"]).__name__ == "RowwiseParallel"
    assert {"blocks.0.qkv", "blocks.1.out"} <= {*found}
    with pytest.raises(TaskError, match="--parallel tensor needs pairs of layers"):
        plan(sw.load_task("digits").model(), 2)
    with pytest.raises(TaskError, match="3 processes divide"):
        plan(nn.Sequential(*_linears(4, 8, 4)), 3)
    layer = nn.Linear(4, 4)
    with pytest.raises(TaskError, match="Sequential has none"):  # what comes twice would be called with a part
        plan(nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(4, 3)), 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parallel", "fsdp", "--shard-optimizer"], "--shard-optimizer needs --parallel data"),
        (["--parallel", "pipeline", "--reduce", "server"], "--reduce server needs --parallel data"),
        (["--parallel", "fsdp", "--workers", "3", "--processes", "2"], "as many workers on every process"),
        (["--parallel", "fsdp", "--optimizer", "muon"], "muon needs whole matrices"),
        (["--parallel", "fsdp", "--optimizer", "soap"], "soap needs whole matrices"),
        (["--parallel", "tensor", "--optimizer", "lamb"], "lamb needs norms of whole matrices"),
        (["--parallel", "pipeline", "--set", "bn=true", "--batch-norm", "sync"], "--batch-norm sync needs the whole"),
        (["--parallel", "fsdp", "--layout", "channels_last"], "use --layout contiguous"),
        (["--parallel", "pipeline", "--layout", "channels_last"], "use --layout contiguous"),
        (["--parallel", "rows"], "data"),
    ],
)
def test_placements_that_cannot_be(scalewise_here, flags, message):
    outcome = scalewise_here("train", "digits", *flags)
    assert outcome.code == 2
    assert message in outcome.stderr
    assert outcome.stderr.count("\n") == 1


def test_a_model_that_cannot_be_split_ends_with_a_clear_line(scalewise, tmp_path):
    (tmp_path / "mine.py").write_text(BRANCHED)
    flags = ["--parallel", "pipeline", "--workers", 2, "--processes", 2, "--recipe", "plain", "--quiet"]
    outcome = scalewise("train", "mine.py", *flags)
    assert outcome.code == 2
    assert "--parallel pipeline needs a model that is a chain of layers" in outcome.stderr
    assert not (tmp_path / "runs").exists()


def test_a_process_that_dies_ends_the_bench(scalewise, tmp_path):
    task = tmp_path / "dying.py"
    task.write_text(DYING)
    outcome = scalewise("bench", "parallelism", task, "--processes", 2, "--quiet")
    assert outcome.code == 1
    assert "process 1 was killed by SIGKILL; one of 2 that were timed together: start again" in outcome.stderr
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(task) in line]


def test_a_scalar_parameter_cannot_be_cut():
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(PlacementError, match=r"got the scalar 'scale'; give it the shape \(1,\)"):
        refuse_scalars(model)


WAYS = {"data": 0.0161, "sharded-optimizer": 0.0131, "pipeline": 0.0329}


def _ways(**seconds: float) -> ParallelismReport:
    moved = dict.fromkeys(KINDS, 16_400)
    figures = {"exact": True, "loss_difference": 0.0, "parameter_bytes": 123_000, "peak_rss_bytes": 250_000_000}
    figures |= {"sent_by_kind_bytes_per_step": moved, "received_by_kind_bytes_per_step": moved, "idle_share": 0.82}
    rows = [
        Row(name, **figures, step_seconds=took, bubble_share=0.5 if name == "pipeline" else None)
        for name, took in (WAYS | seconds).items()
    ]
    return ParallelismReport("digits", sw.Recipe(workers=4), 2, None, [*rows, Row("tensor", reason="it cannot")])


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_in_the_table_of_ways_is_cut_off(width):
    text = terminal.text(benching_story(Stored(_ways().to_json())), width)
    assert "…" not in text
    assert "82 %    50 %" in text
    assert ("250 MB" in text) == (width == 120)


def test_a_small_difference_between_ways_is_no_advice():
    assert _ways().advice.startswith("sharded-optimizer has the shortest step here (13.1 ms against 16.1 with data)")
    assert _ways(**{"sharded-optimizer": 0.0155}).advice.startswith("no step is notably shorter here than that with")


@pytest.mark.parametrize(("file", "function"), PLACES)
def test_payload_knows_the_files_that_send(file, function):
    """By their names: a file or function that was renamed would be counted as numbers."""
    roots = [Path(sw.__file__).parent, Path(torch.__file__).parent / "distributed"]
    (found,) = [path for root in roots for path in root.rglob(Path(file).name) if str(path).endswith(file)]
    assert not function or f"def {function}(" in found.read_text()


def test_bench_parallelism(scalewise):
    flags = ["--set", "bn=true", "--rounds", 1, "--processes", 2, "--workers", 2, "--worker-batch", 8]
    found = scalewise("bench", "parallelism", "digits", *flags, "--json", "--quiet").json
    rows = {row["name"]: row for row in found["rows"]}
    assert [*rows] == ["data", "sharded-optimizer", "server", "fsdp", "pipeline", "tensor"]
    assert "needs pairs of layers" in rows["tensor"]["reason"]
    assert rows["pipeline"]["bubble_share"] == pytest.approx(1 / 5)
    for name in ("data", "sharded-optimizer", "server", "fsdp", "pipeline"):
        assert rows[name]["exact"]
        assert rows[name]["loss_difference"] == 0
        assert rows[name]["step_seconds"] > 0
        assert 0 <= rows[name]["idle_share"] <= 1
    assert rows["data"]["sent_by_kind_bytes_per_step"]["gradients"] > 0
    assert rows["fsdp"]["parameter_bytes"] < 0.6 * rows["data"]["parameter_bytes"]
    assert found["advice"]
