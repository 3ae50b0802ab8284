"""The notebooks run, their questions judge rightly, and their pages open in a real browser."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupyter_client
import jupytext
import nbformat
import pytest
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

from scalewise.errors import UsageError
from scalewise.labs.__main__ import main
from scalewise.labs.questions import QUESTIONS, judge
from test_report_browser import CHROMIUM, FLAGS, PHONE, WIDE, Tab, serious

LABS = Path(__file__).parents[1] / "labs"
SOURCES = sorted(LABS.glob("[0-9]-*.py"))
MOST_BYTES = 1_000_000
names = [source.stem for source in SOURCES]

# What a learner may write: right answers, then wrong ones that people give.
ANSWERS: dict[str, tuple[list[str], list[str]]] = {
    "1.1": (
        ["lambda w, b, x, y: (((w * x + b - y) * x).mean(), (w * x + b - y).mean())"],
        ["lambda w, b, x, y: (((w * x + b - y) * x).sum(), (w * x + b - y).sum())", "lambda: 1", "7"],
    ),
    "1.2": (["449", "449.1"], ["450", "44", "44900", "'b'"]),
    "1.3": (["'b'", "' B '"], ["'c'", "2", "''"]),
    "1.4": (["0.25", "2 / 8"], ["0.5", "20", "float('nan')"]),
    "2.1": (
        ["lambda X, y, w, b: (X.T @ (1 / (1 + np.exp(-(X @ w + b))) - y) / len(y), "
         "(1 / (1 + np.exp(-(X @ w + b))) - y).mean())"],
        ["lambda X, y, w, b: (X.T @ (X @ w + b - y) / len(y), (X @ w + b - y).mean())", "lambda X, y, w, b: None"],
    ),
    "2.2": (["64 * 32 + 32 + 32 * 10 + 10", "np.int64(2410)"], ["64 * 32 + 32 * 10", "True"]),
    "2.3": (["12"], ["14", "24"]),
    "2.4": (["'c'"], ["'a'", "'d'"]),
    "3.1": (["170.7", "1024 / 6"], ["512", "1024 / 2"]),
    "3.2": (["'b'"], ["'a'"]),
    "3.3": (["int((10e6 - fixed_bytes) // sample_bytes)"], ["int(10e6 // sample_bytes)", "1"]),
    "3.4": (["1", "1.0"], ["8", "0.03125"]),
    "4.1": (["lambda size, processes: 2 * (processes - 1) / processes * size"], ["lambda size, processes: 2 * size"]),
    "4.2": (["'c'"], ["'b'"]),
    "4.3": (["0.2", "3 / 15"], ["0.25", "0.333"]),
    "4.4": (["'b'"], ["'a'", "'c'"]),
    "5.1": (["lambda L, T, c, b: b * c * (L - T) / (c * T - L)"], ["lambda L, T, c, b: b * (L - T) / T"]),
    "5.2": (["0.25"], ["0.75", "3"]),
    "5.3": (["500"], ["125", "400"]),
    "5.4": (["'b'"], ["'a'"]),
    "6.1": (
        ["lambda lr, workers, warmup, epochs: lr * (1 + (workers - 1) * min(1, epochs / warmup))"],
        ["lambda lr, workers, warmup, epochs: lr * workers * min(1, epochs / warmup)"],
    ),
    "6.2": (["0.99**144", "0.235"], ["0.01", "0.765"]),
    "6.3": (["0.02"], ["0.04", "0.005"]),
    "6.4": (["'a'"], ["'b'"]),
    "7.1": (
        ["lambda single, n, b, critical: math.ceil(single * (1 + critical / (n * b)) / (1 + critical / b))"],
        ["lambda single, workers, b, critical: math.ceil(single / workers)"],
    ),
    "7.2": (["30", "30.0"], ["3.75", "20"]),
    "7.3": (["1600"], ["40", "400"]),
    "7.4": (["'c'"], ["'b'", "'d'"]),
}  # fmt: skip


# Fewer seeds and epochs than a learner takes: `make labs` runs and renders the notebooks as they are.
SHORTER = {
    "5-why-accuracy-falls": ("SEEDS = 3\n", "SEEDS = 2\n"),
    "6-remedies-and-a-table": ("SEEDS, EPOCHS, WORKERS = 2, 5.0, 8\n", "SEEDS, EPOCHS, WORKERS = 1, 1.0, 8\n"),
}


def render() -> Any:
    """labs/render.py as a module."""
    spec = importlib.util.spec_from_file_location("labs_render", LABS / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def kernel() -> Iterator[Any]:
    """A Jupyter kernel of its own for each notebook, as a learner has it."""
    manager = jupyter_client.AsyncKernelManager(kernel_name="python3")
    yield manager
    run_sync(manager.shutdown_kernel)(now=True)


def tried(source: str, answer: str) -> str:
    """A question's cell with an answer in it."""
    return re.sub(r"(answer_\d) = None", lambda found: f"{found[1]} = {answer}", source, count=1)


def with_answers(source: Path, folder: Path) -> Any:
    """The notebook, then its questions once more with right and wrong answers."""
    long, short = SHORTER.get(source.stem, ("", ""))
    text = source.read_text()
    assert long in text
    notebook = jupytext.reads(text.replace(long, short, 1), fmt=source.suffix)
    start = f"import os\nos.chdir({str(folder)!r})"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    asked = {found[1]: cell.source for cell in cells if (found := re.search(r'labs.check\("(.*?)"', cell.source))}
    more = [
        (tried(asked[name], answer), {"answers": name, "right": right})
        for name in asked
        for right, answers in zip((True, False), ANSWERS[name], strict=True)
        for answer in answers
    ]
    make = nbformat.v4.new_code_cell
    notebook.cells = [make(start), *cells]
    notebook.cells += [make("import math\nimport numpy as np"), *(make(code, metadata=data) for code, data in more)]
    return notebook


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.mark.parametrize("source", SOURCES, ids=names)
def test_a_notebook_runs_and_judges_answers(source, kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = with_answers(source, tmp_path)
    client = NotebookClient(notebook, km=kernel, timeout=280)
    try:
        client.execute()  # a cell that fails raises
    finally:
        client.kc.stop_channels()
    checks = [cell for cell in notebook.cells if "labs.check(" in cell.source]
    own = [cell for cell in checks if "answers" not in cell.metadata]
    assert len(own) == 4
    assert all(printed(cell).startswith("○ ") and "not answered yet" in printed(cell) for cell in own)
    given = [cell for cell in checks if "answers" in cell.metadata]
    assert len(given) >= 8
    for cell in given:
        mark = "✓" if cell.metadata["right"] else "✗"
        assert printed(cell).startswith(f"{mark} {cell.metadata['answers']} "), cell.source + printed(cell)


def test_every_question_is_asked_once_and_tried_here():
    asked = [name for source in SOURCES for name in re.findall(r'labs.check\("(.*?)"', source.read_text())]
    assert asked == [*QUESTIONS] == [*ANSWERS]


def test_right_answers_are_not_written_down():
    for name, question in QUESTIONS.items():
        assert question.rule is not None or re.fullmatch("[0-9a-f]{16}", question.digest), name


def test_a_failing_function_is_an_answer_and_an_unknown_question_is_not():
    assert judge("1.1", lambda w, b, x, y: 1 / 0).text.startswith("your function failed: ZeroDivisionError")
    with pytest.raises(UsageError, match=r"must be one of 1\.1, .* got '9\.9'"):
        judge("9.9", 1)


@pytest.mark.parametrize("source", SOURCES, ids=names)
def test_a_page_is_that_of_its_source(source):
    page = (LABS / "rendered" / f"{source.stem}.html").read_text()
    found = re.search('name="source-sha256" content="(.*?)"', page)
    assert found is not None
    assert found[1] == render().sha256(source), "run: make labs"
    assert len(page) < MOST_BYTES
    assert page.count("<math") == page.count("</math") > 0
    assert "$" not in re.sub(
        "<script.*?</script>|<pre.*?</pre>", "", page, flags=re.DOTALL
    )  # no formula is left as TeX


def test_the_page_of_a_small_notebook(tmp_path):
    source = tmp_path / "0-small.py"
    source.write_text("# %% [markdown]\n# # Small <one>\n# with $x^2$\n\n# %%\nprint('said <b>')\n")
    notebook = jupytext.read(source)
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text=text) for text in ("said ", "<b>\n")]
    page = render().page(notebook, source)
    assert "<title>Small &lt;one&gt;</title>" in page
    assert "<msup><mi>x</mi><mn>2</mn></msup>" in page
    assert "said &lt;b&gt;" in page


def test_notebooks_are_written_once(tmp_path, capsys):
    assert main([str(tmp_path / "mine")]) == 0
    said = capsys.readouterr()
    written = [Path(line) for line in said.out.splitlines()]
    assert [path.suffix for path in written] == [".ipynb"] * 7 + [".py"] * 2
    assert nbformat.read(written[0], 4).cells[0].source.startswith("# 1 · Gradient descent")
    assert written[-1].read_text() == (LABS / "lecture_style.py").read_text()
    assert main([str(tmp_path / "mine")]) == 2  # a learner's answers stay
    assert "name another folder" in capsys.readouterr().err
    assert main([str(written[-1])]) == 2  # a file is no folder
    refused = capsys.readouterr().err
    assert (refused.startswith("the notebooks need a folder that can be written"), refused.count("\n")) == (True, 1)
    assert main(["--help"]) == 0


def test_without_the_extra_one_line_says_how_to_get_it():
    code = "import sys; sys.modules['jupytext'] = None; from scalewise.labs.__main__ import main; sys.exit(main(['x']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "the labs need jupytext, which is not installed; pip install 'scalewise[labs]'\n"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install '.[dev]'")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; apt-get install chromium")


@in_browser
@pytest.mark.parametrize("source", SOURCES, ids=names)
def test_a_page_opens_alone_and_fits_a_phone(chromium, source):
    path = LABS / "rendered" / f"{source.stem}.html"
    for size in (WIDE, PHONE):
        tab = Tab(chromium, size)
        page = tab.open(path)
        width, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        pictures = page.evaluate("[...document.images].map(one => [one.naturalWidth, one.alt.length])")
        formulas = page.evaluate(
            "[...document.querySelectorAll('math')].map(one => one.getBoundingClientRect().height)"
        )
        tab.context.close()
        assert tab.wrong == []
        assert [address for address in tab.asked if not address.startswith("data:")] == [path.as_uri()]
        assert width <= inner
        assert len(pictures) >= 1
        assert all(wide > 100 and alt > 20 for wide, alt in pictures)
        assert all(height > 5 for height in formulas)


@in_browser
@pytest.mark.parametrize("source", [SOURCES[0], SOURCES[5]], ids=lambda source: source.stem)
def test_axe_finds_nothing_serious_in_a_lab(chromium, source):
    tab = Tab(chromium)
    found = serious(tab.open(LABS / "rendered" / f"{source.stem}.html"))
    tab.context.close()
    assert found == []


@in_browser
def test_the_paths_grow_with_the_slider_and_play(chromium):
    tab = Tab(chromium)
    page = tab.open(LABS / "rendered" / f"{SOURCES[0].stem}.html")
    points = lambda: page.evaluate(  # noqa: E731
        "[...document.querySelectorAll('.paths polyline')].map(one => one.getAttribute('points').split(' ').length)"
    )
    whole = points()
    assert len(whole) == 3
    assert whole[2] == 9  # eight steps of gradient descent, which lie on top
    page.locator(".paths input").press("Home")
    assert points() == [1, 1, 1]
    page.get_by_role("button", name="Play").click()
    page.wait_for_function(
        "document.querySelectorAll('.paths polyline')[0].getAttribute('points').split(' ').length > 20"
    )
    page.get_by_role("button", name="Pause").click()
    assert points()[0] < whole[0]
    tab.context.close()
    assert tab.wrong == []
