"""A profile in a terminal: the bottleneck, the phases, the layers, one step drawn, and the processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from scalewise.present.terminal import blocks
from scalewise.present.words import count, number
from scalewise.runs.profile.result import COMPUTING, INPUT, MEANING, OTHER, UPDATING
from scalewise.runs.profile.verdict import milliseconds, percent

if TYPE_CHECKING:
    from scalewise.runs.profile.result import Communication, InFlight, LayerRow, PhaseRow, Piece, Point, Profile

WIDE = 100  # columns from which there is room for what a phase is
LAYER_LINES = 16
CURVE_WIDTH = 16
HEIGHTS = "▁▂▃▄▅▆▇█"
COLOURS: dict[str, str] = (
    dict.fromkeys(INPUT, "yellow")
    | dict.fromkeys(COMPUTING, "cyan")
    | {"backward": "blue", "communication": "magenta", "return": "white", OTHER: "white"}
    | dict.fromkeys(UPDATING, "green")
)
LETTERS = {
    "read": "r",
    "transport to memory": "m",
    "preprocess": "p",
    "queue": "q",
    "transport to device": "t",
    "forward": "f",
    "loss": "l",
    "output": "o",
    "backward": "b",
    "sum": "s",
    "communication": "c",
    "norms": "n",
    "optimizer": "w",
    "update": "u",
    "return": "e",
    OTHER: "·",
}
WAITING, UNDER_WAY = "░", "  under way"


def screen(found: Profile, width: int) -> RenderableType:
    """Everything, for a terminal of this width."""
    parts: list[RenderableType] = ["", headline(found), "", _advice(found), "", phase_table(found.phases, width), ""]
    parts += [layer_table(found.layers, width), ""] if found.layers else []
    if found.setting.compiled:
        parts += [Text("torch.compile makes one of all layers: they cannot be seen one by one", style="dim"), ""]
    parts += [timeline(found.timeline, found.flights, width), ""]
    if found.setting.processes > 1:
        parts += [communication_line(found.communication), ""]
    return Group(*parts, process_table(found), "", overhead_line(found))


def headline(found: Profile) -> Text:
    """What a step is and how long it takes."""
    setting = found.setting
    speed = setting.workers * setting.worker_batch / found.step_seconds
    of = f"{count(setting.workers, 'worker')} × {setting.worker_batch:,} samples on "
    where = f"{count(setting.processes, 'process', 'processes')}, {count(setting.threads, 'thread')}, {setting.device}"
    return Text.assemble(
        (f"a step takes {milliseconds(found.step_seconds)}", "bold"),
        (f", {number(speed)} samples a second: {of}{where}", "dim"),
    )


def _advice(found: Profile) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("bottleneck", Text(found.bottleneck, style="bold yellow"))
    table.add_row("advice", Text(found.advice))
    return table


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), header_style="dim"
    )


def phase_table(rows: Sequence[PhaseRow], width: int) -> Table:
    """Seconds worked and waited by phase, how much of the work was beside the step, and the part of its time."""
    beside = any(row.beside_seconds for row in rows)
    table = _table("where the time of a step goes")
    table.add_column("phase", no_wrap=True)
    for title in ("worked", "waited", *(["beside"] if beside else []), "share"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    if width >= WIDE:
        table.add_column("", style="dim", no_wrap=True)
    longest = max(row.share for row in rows) or 1.0
    for row in rows:
        cells = [_time(row.worked_seconds), _time(row.waited_seconds)]
        cells += [_time(row.beside_seconds)] if beside else []
        used = row.worked_seconds + row.waited_seconds > 0
        bar = _bar(row, longest, 10 if beside else 20)
        meaning = [MEANING[row.name]] if width >= WIDE else []
        table.add_row(row.name, *cells, percent(row.share) if used else "", bar, *meaning, style="" if used else "dim")
    return table


def _bar(row: PhaseRow, longest: float, width: int) -> Text:
    """Worked solid, waited shaded."""
    colour = COLOURS[row.name]
    step = row.step_seconds or 1.0
    cells = width * row.share / longest
    waited = round(cells * row.waited_seconds / step)
    worked = max(0.0, cells - waited) if row.waited_seconds < step else 0.0
    return Text.assemble((blocks(worked), colour), (WAITING * waited, colour))


def layer_table(layers: Sequence[LayerRow], width: int) -> RenderableType:
    """The layers that take the most time, in the model's order."""
    largest = sorted(layers, key=lambda row: -row.worked_seconds)[:LAYER_LINES]
    shown = [row for row in layers if row in largest]
    rest = sum(row.share for row in layers) - sum(row.share for row in shown)
    table = _table("layer by layer")
    table.add_column("layer", overflow="ellipsis", no_wrap=True, max_width=width // 3)
    table.add_column("", style="dim", no_wrap=True, overflow="ellipsis", max_width=22)
    for title in ("forward", "backward", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    longest = max(row.worked_seconds for row in shown) or 1.0
    for row in shown:
        forward, backward = (20 * part / longest for part in (row.forward_seconds, row.backward_seconds))
        bar = Text.assemble(("█" * round(forward), "cyan"), (blocks(forward + backward - round(forward)), "blue"))
        times = _time(row.forward_seconds), _time(row.backward_seconds)
        table.add_row(escape(row.name), "" if row.kind == "loss" else row.kind, *times, percent(row.share), bar)
    if len(layers) == len(shown):
        return table
    return Group(table, Text(f"and {len(layers) - len(shown)} more, {percent(rest)} together", style="dim"))


def timeline(pieces: Sequence[Piece], flights: Sequence[InFlight], width: int) -> RenderableType:
    """One step as it mostly is, process by process: a letter for the phase that fills most of a cell."""
    stop = max(piece.stop_seconds for piece in pieces)
    lanes = dict.fromkeys(piece.process for piece in pieces)
    label = 2 + max(len(UNDER_WAY), *(len(f"process {lane}") for lane in lanes))
    cells = width - label
    lines = [Text.assemble(("one step", "bold"), (f", {milliseconds(stop)} from left to right", "dim"))]
    for lane in lanes:
        own = [piece for piece in pieces if piece.process == lane]
        lines.append(Text.assemble((f"{f'process {lane}':<{label}}", "dim"), *_cells(own, stop / cells, cells)))
        flying = [flight for flight in flights if flight.process == lane]
        if flying:
            lines.append(Text.assemble((f"{UNDER_WAY:<{label}}", "dim"), _under_way(flying, stop / cells, cells)))
    return Group(*lines, _legend(pieces, width))


def _cells(pieces: Sequence[Piece], cell: float, count: int) -> list[tuple[str, str]]:
    """Each cell's letter and colours."""
    filled: list[dict[tuple[str, bool], float]] = [{} for _ in range(count)]
    for piece in pieces:
        key = (piece.name, piece.waited_seconds > 0)
        for place in range(int(piece.start_seconds / cell), min(count, int(piece.stop_seconds / cell) + 1)):
            share = min(piece.stop_seconds, (place + 1) * cell) - max(piece.start_seconds, place * cell)
            filled[place][key] = filled[place].get(key, 0.0) + max(0.0, share)
    return [_cell(parts, cell) for parts in filled]


def _cell(parts: dict[tuple[str, bool], float], cell: float) -> tuple[str, str]:
    if sum(parts.values()) < cell / 2:
        return " ", ""
    (name, waits), _ = max(parts.items(), key=lambda part: part[1])
    return (WAITING, COLOURS[name]) if waits else (LETTERS[name], f"black on {COLOURS[name]}")


def _under_way(flights: Sequence[InFlight], cell: float, count: int) -> tuple[str, str]:
    covered = [
        any(f.start_seconds < (place + 1) * cell and f.start_seconds + f.seconds > place * cell for f in flights)
        for place in range(count)
    ]
    return "".join("━" if there else " " for there in covered), "magenta"


def _legend(pieces: Sequence[Piece], width: int) -> Text:
    """What the letters stand for, broken between entries only."""
    seen = {piece.name for piece in pieces}
    entries = [
        Text.assemble((f" {letter} ", f"black on {COLOURS[name]}"), (f" {name}", "dim"))
        for name, letter in LETTERS.items()
        if name in seen
    ]
    if any(piece.waited_seconds for piece in pieces):
        entries.append(Text.assemble((WAITING * 3, "yellow"), (" waiting", "dim")))
    lines = [Text()]
    for entry in entries:
        if len(lines[-1]) + len(entry) > width:
            lines.append(Text())
        lines[-1].append(entry).append("  ")
    return Text("\n").join(lines)


def communication_line(found: Communication) -> Text:
    """How much was under way, and how much of it cost time."""
    return Text.assemble(
        ("communication", "bold"),
        f"  {found.operations:.0f} operations a step, {milliseconds(found.in_flight_seconds)} under way: "
        f"{milliseconds(found.waited_seconds)} waited for, {milliseconds(found.hidden_seconds)} hidden behind work "
        f"({milliseconds(found.behind_backward_seconds)} of it behind backward)",
    )


def process_table(found: Profile) -> Table:
    """What each process used of the machine."""
    table = _table("the machine meanwhile")
    table.add_column("", no_wrap=True)
    for title in ("processor", "", "memory", ""):
        table.add_column(title, no_wrap=True, justify="right" if title else "left")
    for row in found.by_process:
        use = row.usage
        held = use.memory_bytes if use.device_bytes is None else use.device_bytes
        table.add_row(
            f"process {row.process}",
            percent(use.processor_share if use.device_share is None else use.device_share),
            Text(curve(use.processor_over_time), style="cyan"),
            f"{held / 1e6:,.0f} MB",
            Text(curve(use.memory_over_time), style="blue"),
        )
        for loader in row.loaders:
            table.add_row(f"  loader {loader.number}", percent(loader.busy_share), Text("busy", style="dim"))
    return table


def curve(points: Sequence[Point]) -> str:
    """Values over time as heights from 0 to the largest.

    >>> from scalewise.runs.profile.result import Point
    >>> curve([Point(0, 1.0), Point(1, 2.0)])
    '▅█'
    """
    size = -(-len(points) // CURVE_WIDTH) or 1
    means = [_mean(points[start : start + size]) for start in range(0, len(points), size)]
    top = max(means, default=0.0) or 1.0
    return "".join(HEIGHTS[round((len(HEIGHTS) - 1) * max(0.0, mean) / top)] for mean in means)


def _mean(points: Sequence[Point]) -> float:
    return sum(point.value for point in points) / len(points)


def overhead_line(found: Profile) -> Text:
    """What looking costs."""
    cost = found.overhead
    interval = f"95 %: {signed(cost.low)} to {signed(cost.high)}"
    both = f"{milliseconds(cost.profiled_seconds)} against {milliseconds(cost.plain_seconds)}"
    told = f"profiling makes a step {signed(cost.share)} longer ({interval}; {both})"
    if cost.low <= 0 <= cost.high:
        told = f"what profiling costs cannot be told from the noise of this machine ({interval}; {both})"
    return Text(
        f"{found.steps:,} steps profiled in {cost.rounds} rounds, by turns with as many plain ones: {told}; it takes "
        f"{signed(cost.processor_share)} more processor time",
        style="dim",
    )


def signed(share: float) -> str:
    """A share that may be negative, for a person.

    >>> signed(0.034), signed(-0.012)
    ('3.4 %', '−1.2 %')
    """
    return f"{'−' if share < 0 else ''}{abs(100 * share):.1f} %"


def _time(seconds: float) -> str:
    return milliseconds(seconds) if seconds >= 5e-8 else ""
