"""Execute the notebooks and write a page of each: `python labs/render.py [1 4 …]`.

A page needs no network and no library: formulas are MathML, figures are SVG inside it.
"""

from __future__ import annotations

import datetime
import hashlib
import html
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jinja2
import jupytext
import latex2mathml.converter
import nbformat
import torch
from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from nbclient import NotebookClient
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

LABS = Path(__file__).parent
RENDERED = LABS / "rendered"
RESULTS = LABS.parent / "benchmarks" / "results"
CELL_SECONDS = 300


def sources() -> list[Path]:
    """The notebooks, in order."""
    return sorted(LABS.glob("[0-9]-*.py"))


def page_of(source: Path) -> Path:
    """Where a notebook's page is."""
    return RENDERED / source.with_suffix(".html").name


def sha256(source: Path) -> str:
    """What a page says it was made from: the notebook, and the programs and measured tables that it names."""
    text = source.read_text(encoding="utf-8")
    programs = sorted(set(re.findall(r'labs\.(?:code|program)\("(.+?)"', text)))
    tables = sorted(set(re.findall(r'labs\.measured\("(.+?)"', text)))
    named = [LABS / name for name in programs] + [RESULTS / f"{name}.json" for name in tables]
    return hashlib.sha256(b"".join(path.read_bytes() for path in (source, *named))).hexdigest()


def execute(source: Path, folder: Path) -> Any:
    """The notebook with what its cells said, run in a folder of its own; a failing cell raises."""
    notebook = jupytext.read(source)
    client = NotebookClient(
        notebook, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    return client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})


def page(notebook: Any, source: Path) -> str:
    """An executed notebook as one HTML page."""
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string(
        (LABS / "page.html").read_text(encoding="utf-8")
    )
    parts = [part for cell in notebook.cells for part in cell_parts(cell)]
    heading = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
    return template.render(
        title=html.escape(heading),
        sha256=sha256(source),
        source=source.name,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        torch=torch.__version__,
        cores=os.cpu_count(),
        parts=parts,
        code_style=HtmlFormatter(nobackground=True).get_style_defs(".code"),
    )


def cell_parts(cell: Any) -> list[str]:
    """What a cell shows: its text, or its code and what that said."""
    if cell.cell_type == "markdown":
        return [text_page(cell.source)]
    return [code_page(cell.source), *(output_page(output) for output in joined(cell.outputs))]


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs, with what was printed in several pieces put together."""
    kept: list[Any] = []
    for output in outputs:
        if kept and output.output_type == kept[-1].output_type == "stream":
            kept[-1] = nbformat.from_dict(kept[-1] | {"text": kept[-1].text + output.text})
        else:
            kept.append(output)
    return kept


def text_page(text: str) -> str:
    """Markdown with $formulas$."""
    parser = MarkdownIt("commonmark").enable("table")
    dollarmath_plugin(parser, renderer=formula, double_inline=True)
    return (
        str(parser.render(text)).replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    )


def formula(latex: str, options: dict[str, Any]) -> str:
    """TeX as MathML, which browsers draw themselves."""
    block = bool(options["display_mode"])
    drawn = str(latex2mathml.converter.convert(latex, display="block" if block else "inline"))
    return f'<div class="formula">{drawn}</div>' if block else drawn


def code_page(code: str) -> str:
    """Code in colours; it scrolls, so the keyboard must reach it."""
    inner = highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))
    return f'<div class="code" tabindex="0"><pre>{inner}</pre></div>'


def output_page(output: Any) -> str:
    """What a cell printed or drew."""
    if output.output_type == "stream":
        return f'<div class="said" tabindex="0"><pre class="wrap">{html.escape(output.text.rstrip())}</pre></div>'
    data = output.data
    if "text/html" in data and "highlight" not in data["text/html"]:
        return str(data["text/html"])
    text = data["text/plain"]
    return (
        code_page(text)
        if "text/html" in data
        else f'<div class="said" tabindex="0"><pre>{html.escape(text)}</pre></div>'
    )


def main(chosen: list[str]) -> int:
    """Render the notebooks that are named by their numbers, or all."""
    RENDERED.mkdir(exist_ok=True)
    for source in sources():
        if chosen and source.name[0] not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            text = page(execute(source, Path(folder)), source)
        page_of(source).write_text(text, encoding="utf-8")
        print(f"{page_of(source).relative_to(LABS.parent)}  {len(text) / 1000:,.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
