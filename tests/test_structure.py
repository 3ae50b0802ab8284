"""The layers, the public names and what importing costs."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import scalewise
from scalewise.recipe import Recipe

SOURCE = Path(scalewise.__file__).parent

# From the bottom up; a module imports only from layers below its own, or from its own package.
LAYERS = [
    {"recipe", "records", "errors", "files", "extras"},
    {"tasks", "nn", "optim", "schedules"},
    {"stats"},
    {"engine"},
    {"plan", "doctor"},
    {"runs"},
    {"watch"},
    {"present"},
    {"adapters", "trackers", "horovod"},
    {"cli"},
]
TOP_LEVEL = {"__init__", "__main__", "labs"}  # the notebooks use the package as its users do
COMMANDS = (
    "train",
    "compare",
    "tune",
    "measure",
    "plan",
    "forecast",
    "profile",
    "doctor",
    "replay",
    "bisect",
    "report",
    "serve",
    "bench",
    "bench devices",
    "bench collectives",
    "bench scaling",
    "bench parallelism",
)
WITHOUT_TORCH = {
    "recipe", "records", "errors", "files", "extras", "schedules", "stats", "plan", "doctor", "present",
    "trackers", "cli",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[0]


def imports(path: Path, anywhere: bool) -> list[str]:
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if anywhere else tree.body
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_from_below(path):
    if package(path) in TOP_LEVEL:
        pytest.skip("it offers or uses names from every layer")
    own = next((level for level, names in enumerate(LAYERS) if package(path) in names), None)
    assert own is not None, f"{package(path)} is in no layer"
    siblings = LAYERS[0] if own == 0 else {package(path)}  # frozen values may use each other
    below = set().union(*LAYERS[:own]) | siblings | {"__version__"}
    for name in imports(path, anywhere=True):
        if name.startswith("scalewise."):
            assert name.split(".")[1] in below, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_layers_without_torch_do_not_import_it(path):
    if package(path) in WITHOUT_TORCH:
        assert not [name for name in imports(path, anywhere=False) if name.split(".")[0] == "torch"]


def test_there_are_no_import_cycles():
    graph = {}
    for path in modules():
        dotted = ".".join(("scalewise", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        graph[dotted] = imports(path, anywhere=False)
    edges = {
        name: {target for target in graph for used in found if used == target or used.rpartition(".")[0] == target}
        - {name}
        for name, found in graph.items()
    }
    edges["scalewise"] = set()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


MOST_COMMAND_LINES = 150


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").glob("*.py")), ids=lambda path: path.name)
def test_a_command_is_thin(path):
    """It parses, calls `runs` and draws."""
    assert len(path.read_text().splitlines()) <= MOST_COMMAND_LINES


@pytest.mark.parametrize(
    "name", ["bench.collectives", "bench.devices", "bench.parallelism", "bench.scaling", "bisect", "profile", "replay"]
)
def test_a_question_is_a_function_with_the_names_of_the_flags(name):
    command = name.removeprefix("bench.")
    asked = getattr(importlib.import_module(f"scalewise.runs.{name}"), command)
    home = {"scaling": "bench_training", "parallelism": "bench_training", "profile": "profile"}.get(command, "bench")
    home = command if command in ("bisect", "replay") else home
    flags = inspect.signature(getattr(importlib.import_module(f"scalewise.cli.{home}"), command)).parameters
    drawn = {"json", "quiet", "flags"}  # the recipe's fields are keywords
    assert set(flags) - drawn <= set(inspect.signature(asked).parameters)


@pytest.mark.parametrize("name", ["compare", "forecast", "measure", "plan", "tune"])
def test_a_public_question_has_the_names_of_the_flags(name):
    flags = inspect.signature(getattr(importlib.import_module(f"scalewise.cli.{name}"), name)).parameters
    assert set(flags) - {"task", "json", "quiet", "flags"} <= set(
        inspect.signature(getattr(scalewise, name)).parameters
    )


def test_public_names():
    assert sorted(scalewise.__all__) == [
        "Epoch", "Loss", "NoiseScale", "Placement", "Recipe", "Result", "ScalewiseError", "Step", "Task",
        "accuracy", "adapters", "augment", "compare", "fit", "forecast", "load_task", "measure", "nn", "optim", "plan",
        "train", "tune", "watch",
    ]  # fmt: skip
    for name in scalewise.__all__:
        assert getattr(scalewise, name) is not None
    with pytest.raises(AttributeError):
        scalewise.nothing  # noqa: B018


@pytest.mark.parametrize("name", [name for name in scalewise._HOMES if (SOURCE / name).is_dir()])
@pytest.mark.parametrize("before", [True, False])
def test_public_functions_keep_their_names_beside_packages(name, before):
    modules = [f"scalewise.{name}.{path.stem}" for path in (SOURCE / name).glob("[a-z]*.py")]
    use = f"import scalewise; function = scalewise.{name}; assert callable(function) and function is scalewise.{name}"
    lines = [*([use] if before else []), *(f"import {module}" for module in modules), use]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


def test_recipe_fields():
    assert list(Recipe.model_fields) == [
        "workers", "worker_batch", "micro_batch", "epochs", "steps", "optimizer", "lr", "lr_rule", "warmup_epochs",
        "schedule", "drop", "momentum", "beta1", "beta2", "epsilon", "weight_decay", "trust_coefficient",
        "adapt_vectors", "label_smoothing", "clip_norm", "batch_norm", "statistics", "precision", "compile", "layout",
        "threads", "seed", "patience", "target",
    ]  # fmt: skip


def test_every_recipe_field_is_a_flag(scalewise):
    text = scalewise("train", "--help").stdout
    others = [
        "set",
        "recipe",
        "data",
        "processes",
        "min-processes",
        "max-restarts",
        "hang-timeout",
        "device",
        "reduce",
        "parallel",
        "shard-optimizer",
        "noise",
        "loaders",
        "out",
        "resume",
    ]
    for name in [*Recipe.model_fields, *others, "checkpoint-steps", "track", "json", "quiet"]:
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize("code", ["import scalewise", "import scalewise; scalewise.Recipe(workers=2)"])
def test_importing_does_not_import_torch(code):
    check = f"{code}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["tasks"], ["tasks", "--json"], *([*name.split(), "--help"] for name in COMMANDS)],
)
def test_help_does_not_import_torch(arguments):
    check = (
        "import sys\nfrom scalewise.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


ONE_HOME = {  # what must be defined once: the start of the function's name, and where
    "percent": "present/words.py",
    "last_lines": "engine/processes/last_words.py",
    "stopping": "engine/processes/signals.py",
    "efficiency": "stats/critical_batch.py",
    "fit_law": "stats/steps_law.py",
}


@pytest.mark.parametrize("name", ONE_HOME)
def test_a_thing_is_defined_once(name):
    homes = [
        str(path.relative_to(SOURCE))
        for path in modules()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.strip("_") == name
    ]
    assert homes == [ONE_HOME[name]]


def test_the_house_stays_small():
    """Files of source: a new one must be worth a newcomer's look."""
    assert len(modules()) <= 240


LEAVE = """
import gc, weakref
import torch.distributed as dist
from scalewise.engine.processes.team import leave
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import torch._dynamo  # as a user's model does that recomputes its activations
group = weakref.ref(dist.group.WORLD)
leave()
gc.collect()
assert group() is None
"""


def test_the_process_group_is_gone_when_the_job_is_left():
    """Its threads abort a Python that ends before them."""
    done = subprocess.run([sys.executable, "-c", LEAVE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


STARTED = """
import sys
import scalewise as sw
for optimizer in ("adam", "lamb", "muon"):
    [*sw.train(sw.load_task("mlp"), sw.Recipe(workers=2, steps=2, optimizer=optimizer, threads=1))]
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""


def test_training_does_not_import_torchs_compiler():
    done = subprocess.run([sys.executable, "-c", STARTED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[]\n", done.stdout + done.stderr


STEP_FILES = 14
STEPS = {  # 8 workers on one process: settings of `digits`, and what the recipe adds
    "momentum": ({}, {}),
    "adam": ({}, {"optimizer": "adam"}),
    "muon": ({}, {"optimizer": "muon"}),
    "soap": ({}, {"optimizer": "soap"}),
    "schedule-free": ({}, {"optimizer": "schedule-free"}),
    "clipping": ({}, {"clip_norm": 1.0}),
    "micro-batches": ({}, {"micro_batch": 8}),
    "batch-norm": ({"bn": "true"}, {}),
    "ghost-batch-norm": ({"bn": "true"}, {"batch_norm": "ghost:8"}),
    "sync-batch-norm": ({"bn": "true"}, {"batch_norm": "sync"}),
    "dropout": ({"dropout": "0.1"}, {}),
    "adascale": ({}, {"lr_rule": "adascale"}),
    "schedule": ({}, {"schedule": "cosine", "warmup_epochs": 1.0, "lr_rule": "linear"}),
    "lars": ({}, {"optimizer": "lars"}),
    "lamb": ({}, {"optimizer": "lamb"}),
    "all": ({"bn": "true"}, {"optimizer": "lamb", "clip_norm": 1.0, "micro_batch": 8, "schedule": "cosine"}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_one_process_passes_few_files(name):
    settings, fields = STEPS[name]
    task = scalewise.load_task("digits", [f"{key}={value}" for key, value in settings.items()])
    training = scalewise.train(task, Recipe(workers=8, worker_batch=16, threads=1, **fields))
    passed = set()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            passed.add(str(Path(frame.f_code.co_filename).relative_to(SOURCE)))

    for _ in range(3):
        next(training)
    for profile in (threading.setprofile, sys.setprofile):  # workers in lockstep have threads of their own
        profile(note)
    try:
        record = next(training)
    finally:
        for profile in (sys.setprofile, threading.setprofile):
            profile(None)
        training.close()
    assert record.kind == "step"
    assert {"engine/loop.py", "engine/pace.py", "engine/sums/flat.py", "tasks/task.py"} <= passed
    assert len(passed) <= STEP_FILES, sorted(passed)
