"""`scalewise bench devices`, `collectives` and `scaling`."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from scalewise.cli import bench_view
from scalewise.cli.inputs import OUTPUT, PLACEMENT, download, leave_page, recipe_flags
from scalewise.engine.placement import DeviceName, Placement, ReduceName, available_cores
from scalewise.errors import PlacementError, RecipeError, ScalewiseError, UsageError
from scalewise.present.live import StatusView
from scalewise.runs.measure.memory.budget import parse_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from scalewise.runs.bench.common import Report
    from scalewise.runs.bench.scaling import Mode

DERIVED_HERE = ("workers", "threads", "epochs", "steps", "schedule", "lr_rule", "warmup_epochs", "patience", "target")
RecipeFlags = recipe_flags(__name__, without=DERIVED_HERE)


@dataclass(frozen=True)
class Options:
    """What is written and drawn."""

    out: Path | None
    json: bool
    quiet: bool


def devices(
    *,
    quick: Annotated[bool, Parameter(negative=())] = False,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Time operations and a small training on the CPU at 1, 2, … threads and on every accelerator here.

    Says from which size an operation is worth more threads, or worth sending to a device, the way there and back
    included.

    scalewise bench devices
    scalewise bench devices --quick --json

    Parameters
    ----------
    quick: bool
        A quarter of the time, about 20 s.
    out: Path | None
        Folder of the result; by default runs/bench-devices-<time>.
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    options = Options(out, json, quiet)
    with _benching(options):
        from scalewise.runs.bench.devices import devices as measure

        view = StatusView(quiet)
        with view.live():
            report = measure(quick, view.notify)
        _finish(report, options, view, bench_view.devices_screen(report))
    return 0


def collectives(
    *,
    processes: str | None = None,
    sizes: str | None = None,
    seconds: float = 30.0,
    hosts: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    rate: Annotated[str | None, Parameter(group=PLACEMENT)] = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Time how fast processes exchange data, and write the link profile that `plan` reads.

    scalewise bench collectives --processes 2,4
    scalewise bench collectives --processes 2 --hosts 2 --rate 1gbit --out link.json

    Parameters
    ----------
    processes: str | None
        How many take part, several as in 2,4; by default 2, 4, … up to the cores.
    sizes: str | None
        Sizes of the data, as in 64kB,1MB,16MB; by default six from 4 KiB to 16 MiB.
    seconds: float
        How long to time, in rounds; three rounds at least. Starting the processes comes on top.
    hosts: int | None
        Spread the processes over so many network namespaces of this machine (Linux, root).
    rate: str | None
        What each host's link carries, as tc writes it: 100mbit, 1gbit.
    device: DeviceName
        Where the data are.
    out: Path | None
        Folder of the result, link.json in it; by default runs/bench-collectives-<time>. A name that ends in .json is
        where the link profile goes as well.
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    profile = out if out is not None and out.suffix == ".json" else None
    options = Options(None if profile else out, json, quiet)
    with _benching(options):
        from scalewise.plan import links
        from scalewise.runs.bench.collectives import SIZES
        from scalewise.runs.bench.collectives import collectives as measure
        from scalewise.runs.bench.common import chosen_device
        from scalewise.runs.bench.jobs import check_counts

        counts = _whole_numbers(processes or ",".join(map(str, _powers_of_two())), "--processes")
        check_counts(counts, 2, hosts)
        _check_rate(hosts, rate)
        _check_seconds(seconds)
        _check_profile(profile)
        chosen = chosen_device(device, max(counts))
        view = StatusView(quiet)
        with view.live():
            report = measure(
                counts,
                SIZES if sizes is None else _sizes(sizes),
                hosts=hosts,
                rate=rate,
                seconds=seconds,
                device=chosen,
                source=f"{shlex.join(['scalewise', *sys.argv[1:]])}, {time.strftime('%Y-%m-%d')}",
                notify=view.notify,
            )
        folder = _finish(report, options, view, bench_view.collectives_screen(report))
        for path in [folder / "link.json", *([profile] if profile else [])]:
            links.save(path, report.link)
        view.console.print(f"[dim]link profile {profile or folder / 'link.json'}[/dim]")
    return 0


def scaling(
    task: str,
    /,
    *,
    processes: str,
    weak: Annotated[bool, Parameter(negative=())] = False,
    strong: Annotated[bool, Parameter(negative=())] = False,
    workers: int | None = None,
    threads: int = 1,
    seconds: float = 25.0,
    flags: Annotated[RecipeFlags, Parameter(name="*")] = RecipeFlags(),  # type: ignore[valid-type]  # noqa: B008
    set: Annotated[list[str] | None, Parameter(negative=())] = None,
    data: Annotated[Path | None, Parameter(group=PLACEMENT)] = None,
    hosts: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    rate: Annotated[str | None, Parameter(group=PLACEMENT)] = None,
    device: Annotated[DeviceName, Parameter(group=PLACEMENT)] = "auto",
    reduce: Annotated[ReduceName, Parameter(group=PLACEMENT)] = "ordered",
    shard_optimizer: Annotated[bool, Parameter(group=PLACEMENT, negative=())] = False,
    loaders: Annotated[int | None, Parameter(group=PLACEMENT)] = None,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
    quiet: Annotated[bool, Parameter(group=OUTPUT, negative=())] = False,
) -> int:
    """Train on one number of processes after another, in rounds by turns: speed, efficiency, and where the rest went.

    scalewise bench scaling fashion-mnist --processes 1,2,4
    scalewise bench scaling digits --processes 1,2 --weak --hosts 2 --rate 100mbit

    Parameters
    ----------
    task: str
        A built-in name, path/to/file.py (its task() function), or package.module:function.
    processes: str
        How many, as in 1,2,4; each is held against the fewest.
    weak: bool
        The global batch grows with the processes.
    strong: bool
        The same global batch on more processes (the default).
    workers: int | None
        Workers in all; by default so many that all numbers of processes share them evenly. With --weak those of each
        process, 1 by default.
    threads: int
        Computing threads of each process, the same for all.
    seconds: float
        How long to time, in rounds; three rounds at least. Starting the processes comes on top.
    set: list[str] | None
        name=value for the task's function; may be repeated.
    data: Path | None
        Folder of the task's data files, looked in before $SCALEWISE_DATA and the usual caches; downloads go there.
    hosts: int | None
        Spread the processes over so many network namespaces of this machine (Linux, root).
    rate: str | None
        What each host's link carries, as tc writes it: 100mbit, 1gbit.
    device: DeviceName
        Kind of device.
    reduce: ReduceName
        How gradients are summed: ordered and server are exact, allreduce is the backend's own.
    shard_optimizer: bool
        Each process updates, and keeps optimizer state for, its part of the parameters.
    loaders: int | None
        Loader processes of each process, for data that are not in memory.
    out: Path | None
        Folder of the result; by default runs/bench-scaling-<time>.
    json: bool
        Print one JSON document on stdout.
    quiet: bool
        Draw nothing.
    """
    if weak and strong:
        raise UsageError("scaling is either weak or strong, got both; drop --weak or --strong")
    options = Options(out, json, quiet)
    with _benching(options):
        from scalewise.runs.bench.common import chosen_device
        from scalewise.runs.bench.jobs import check_counts
        from scalewise.runs.bench.scaling import TrainingWork, default_workers
        from scalewise.runs.bench.scaling import scaling as measure
        from scalewise.tasks.load import load_task

        counts = sorted(_whole_numbers(processes, "--processes"))
        check_counts(counts, 1, hosts)
        _check_rate(hosts, rate)
        _check_seconds(seconds)
        mode: Mode = "weak" if weak else "strong"
        spread = workers if workers is not None else default_workers(counts) if mode == "strong" else 1
        _check_workers(spread, mode, max(counts))
        download(task, data, quiet)
        loaded = load_task(task, set or (), data)
        given = {name: value for name, value in vars(flags).items() if value is not None}
        recipe = loaded.recipe.replace(**given, threads=threads)
        chosen = chosen_device(device, max(counts))
        placement = Placement(device=chosen, reduce=reduce, shard_optimizer=shard_optimizer, loaders=loaders)
        view = StatusView(quiet)
        with view.live():
            report = measure(
                TrainingWork(task, tuple(set or ()), data, recipe, placement),
                loaded.name,
                counts,
                mode,
                spread,
                hosts=hosts,
                rate=rate,
                seconds=seconds,
                notify=view.notify,
            )
        _finish(report, options, view, bench_view.scaling_screen(report))
    return 0


@contextmanager
def _benching(options: Options) -> Iterator[None]:
    """The context of a bench: it starts its processes itself, and stdout is for the JSON document."""
    from scalewise.engine.store.folder import check_folder

    if "RANK" in os.environ:
        raise UsageError("bench starts its processes itself, got a torchrun job (RANK is set); run it without torchrun")
    check_folder(options.out)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield
        except ScalewiseError:
            raise
        except Exception as error:
            from scalewise.engine.processes.failures import translated

            raise translated(error) from error


def _finish(report: Report, options: Options, view: StatusView, screen: RenderableType) -> Path:
    """Write what came out into its folder, draw it, and print it."""
    from scalewise.runs.bench.common import save_report

    folder, text = save_report(report, options.out)
    leave_page(folder, view.console)
    view.console.print(screen)
    view.console.print(f"[dim]folder {folder}[/dim]")
    if options.json:
        print(text, file=sys.__stdout__, flush=True)
    return folder


def _whole_numbers(text: str, flag: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{flag} must be whole numbers with commas, got {text!r}; write for example {flag} 2,4"
        ) from None


def _powers_of_two() -> list[int]:
    """2, 4, 8, … up to the cores."""
    return [1 << power for power in range(1, max(2, available_cores().bit_length()))]


def _sizes(text: str) -> list[int]:
    found = sorted({parse_bytes(word, "--sizes") for word in text.split(",")})
    if len(found) < 2:
        raise UsageError(
            f"--sizes must name two sizes at least, to tell latency from bandwidth, got {text!r}; "
            f"write for example --sizes 64kB,1MB,16MB"
        )
    return found


def _check_rate(hosts: int | None, rate: str | None) -> None:
    if rate is not None and hosts is None:
        raise PlacementError(f"--rate {rate} is that of links between hosts, got no --hosts; add --hosts 2")


def _check_profile(profile: Path | None) -> None:
    """Before minutes of timing, whether the link profile can be written at last."""
    from scalewise.engine.store.folder import check_writable

    if profile is not None and profile.is_dir():
        raise UsageError(f"--out {profile} must be a file if it ends in .json, got a folder; choose another")
    if profile is not None:
        check_writable(profile.absolute().parent)


def _check_seconds(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds must be above 0, got {seconds}; write for example --seconds 30")


def _check_workers(workers: int, mode: Mode, processes: int) -> None:
    least = processes if mode == "strong" else 1
    if workers < least:
        raise RecipeError(f"workers must be at least {least} here, got {workers}; raise --workers")
