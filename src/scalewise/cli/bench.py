"""`scalewise bench devices` and `collectives`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.cli.flags import Json, Quiet
from scalewise.cli.inputs import OUTPUT, PLACEMENT, asking, options, show, whole_numbers
from scalewise.engine.placement import DeviceName
from scalewise.present.stories.bench import benching_story
from scalewise.runs.measure.memory import parse_bytes


def devices(
    *,
    quick: Annotated[bool, Parameter(negative=())] = False,
    out: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Time operations and a small training on the CPU at 1, 2, … threads and on every accelerator here.

    Says from which size an operation is worth more threads, or worth sending to a device, both copies included.

    scalewise bench devices
    scalewise bench devices --quick --json

    Arguments:
        quick: A quarter of the time, about 20 s.
        out: Folder of the result; by default runs/bench-devices-<time>.
    """
    with asking(quiet) as view:
        from scalewise.runs.bench.devices import devices as measure

        report = measure(quick=quick, out=out, notify=view.notify)
    show(benching_story, report.to_json(), report.run, view.console, json)
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
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Time how fast processes exchange data, and write the link profile that `plan` reads.

    scalewise bench collectives --processes 2,4
    scalewise bench collectives --processes 2 --hosts 2 --rate 1gbit --out link.json

    Arguments:
        processes: How many take part, several as in 2,4; by default 2, 4, … up to the cores.
        sizes: Sizes of the data, as in 64kB,1MB,16MB; by default six from 4 KiB to 16 MiB.
        seconds: How long to time, in rounds; three rounds at least. Starting the processes comes on top.
        hosts: Spread the processes over N network namespaces of this machine (Linux, root).
        rate: What each host's link carries, as tc writes it: 100mbit, 1gbit.
        device: Where the data are.
        out: Folder of the result, link.json in it; by default runs/bench-collectives-<time>. A name that ends in .json
            is where the link profile goes as well.
    """
    asked = options(locals())
    with asking(quiet) as view:
        from scalewise.runs.bench.collectives import collectives as measure

        if processes:
            asked["processes"] = whole_numbers(processes, "--processes")
        if sizes:
            asked["sizes"] = sorted({parse_bytes(word, "--sizes") for word in sizes.split(",")})
        report = measure(**asked, source=shlex.join(["scalewise", *sys.argv[1:]]), notify=view.notify)
    profile = out if out is not None and out.suffix == ".json" else f"{report.run}/link.json"
    show(benching_story, report.to_json(), report.run, view.console, json, [f"link profile {profile}"])
    return 0
