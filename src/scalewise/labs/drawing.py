"""Figures of the notebooks: one style, colours that colour-blind people can tell apart, a caption that says it all."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), darkest first; markers and dashes tell lines apart without any colour
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DOTS_PER_INCH = 100
Path2D = tuple[Sequence[float], Sequence[float], Sequence[float]]  # x, y and the samples seen at each point


def figures() -> Any:  # noqa: ANN401  (the module)
    """matplotlib.pyplot in the labs' style; figures appear where `show` is called."""
    import matplotlib
    from cycler import cycler

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    marks = cycler(color=COLORS, linestyle=["-", "--", "-.", ":", "-", "--", "-."])
    plt.rcParams.update(
        {
            "axes.prop_cycle": marks,
            "axes.grid": True,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "figure.constrained_layout.use": True,
            "figure.figsize": (7.0, 3.6),
            "font.size": 10,
            "grid.alpha": 0.3,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
            "svg.hashsalt": "labs",
        }
    )
    return plt


def show(figure: Figure, caption: str) -> Any:  # noqa: ANN401  (IPython has no types)
    """A figure as SVG with its caption, which is also what a screen reader says."""
    from IPython.display import HTML

    return HTML(f"<figure>{_image(figure, caption)}<figcaption>{html.escape(caption)}</figcaption></figure>")


def _image(figure: Figure, caption: str) -> str:
    """The figure as an image that needs no file; the figure is closed."""
    import matplotlib.pyplot as plt

    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = written.getvalue()
    encoded = base64.b64encode(text[text.index("<svg") :].encode()).decode()
    return f'<img style="max-width:100%" alt="{html.escape(caption)}" src="data:image/svg+xml;base64,{encoded}">'


def table(rows: Sequence[Mapping[str, object]], caption: str = "") -> Any:  # noqa: ANN401
    """Rows as a table: the keys of the first are the heads, floats have four significant digits."""
    from IPython.display import HTML

    heads = "".join(f'<th scope="col">{html.escape(str(name))}</th>' for name in rows[0])
    body = "".join(f"<tr>{''.join(_cell(value) for value in row.values())}</tr>" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return HTML(f'<div class="wide"><table>{title}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>')


def _cell(value: object) -> str:
    if value is None:
        return '<td style="text-align:right">–</td>'
    if isinstance(value, str):
        return f"<td>{html.escape(value)}</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f'<td style="text-align:right">{shown}</td>'


def animate(figure: Figure, axes: Axes, paths: Mapping[str, Path2D], caption: str) -> Any:  # noqa: ANN401
    """Paths that grow over a figure while samples are seen; with a slider, and whole before anyone plays them.

    Paths are in the data coordinates of the axes.
    """
    from IPython.display import HTML

    figure.set_dpi(DOTS_PER_INCH)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # the axes stay where they were found
    width, height = (round(inches * DOTS_PER_INCH) for inches in figure.get_size_inches())
    lines = [_pixels(axes, path, height) | {"name": name} for name, path in paths.items()]
    for line, color in zip(lines, COLORS, strict=False):
        line["color"] = color
    content = {"lines": lines, "last": max(max(samples) for _, _, samples in paths.values())}
    name = "paths-" + hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]
    template = resources.files("scalewise.labs").joinpath("animation.html").read_text(encoding="utf-8")
    values = {"NAME": name, "WIDTH": str(width), "HEIGHT": str(height), "IMAGE": _image(figure, caption)}
    values |= {"CAPTION": html.escape(caption), "CONTENT": json.dumps(content)}
    for key, value in values.items():
        template = template.replace(f"@{key}@", value)
    return HTML(template)


def _pixels(axes: Axes, path: Path2D, height: int) -> dict[str, Any]:
    """A path in pixels from the figure's upper left corner."""
    x, y, samples = (np.asarray(part, dtype=float) for part in path)
    points = axes.transData.transform(np.stack([x, y], axis=1))
    points[:, 1] = height - points[:, 1]
    return {"points": points.round(1).tolist(), "samples": samples.tolist()}
