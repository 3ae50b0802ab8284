"""The page in a real Chromium: nothing goes wrong, nothing is asked of a network, people can use it in every way."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from scalewise.plan import model
from scalewise.plan.hardware import parse_link
from scalewise.plan.model import Inputs
from scalewise.present import page as pages
from test_report import FOLDERS, hostile
from test_serve import Serving, write_steps

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PHONE, WIDE = {"width": 375, "height": 700}, {"width": 1200, "height": 900}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; apt-get install chromium")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install '.[dev]'")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Tab:
    """A page in the browser, and everything that went wrong on it."""

    def __init__(self, chromium: Any, size: dict[str, int] = WIDE, scheme: str = "light") -> None:
        self.context = chromium.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda line: self.wrong.append(line.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def open(self, path: Path) -> Any:
        self.page.goto(path.as_uri())
        return self.page


@pytest.fixture
def tab(chromium) -> Iterator[Tab]:
    opened = Tab(chromium)
    yield opened
    opened.context.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """Pages of every kind, those of an attacker among them."""
    folder = tmp_path_factory.mktemp("pages")
    running = folder / "running"
    running.mkdir()
    recipe = {
        "workers": 8,
        "worker_batch": 32,
        "optimizer": "momentum",
        "lr": 0.02,
        "epochs": 2.0,
        "batch_norm": "worker",
    }
    document = {
        "task": "digits",
        "settings": [],
        "recipe": recipe,
        "derived": [{"field": "lr", "value": 1, "reason": "so"}],
    }
    (running / "recipe.json").write_text(json.dumps(document))
    write_steps(running, 300)
    sources = {name: [FOLDERS / name] for name in ("compare", "measure", "measure-sweep", "plan")}
    sources |= {"running": [running], "hostile": [hostile(folder / "hostile")]}
    sources["all"] = [running, *(FOLDERS / name for name in ("compare-many", "measure", "plan"))]
    for name, folders in sources.items():
        pages.report(folders, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in sources}


@pytest.mark.parametrize("name", ["compare", "measure", "measure-sweep", "plan", "running", "hostile", "all"])
def test_a_page_opens_without_error_or_request_and_draws_its_charts(tab, written, name):
    page = tab.open(written[name])
    assert tab.wrong == []
    assert [address for address in tab.asked if not address.startswith("data:")] == [written[name].as_uri()]
    boxes = page.evaluate(
        """[...document.querySelectorAll("main svg[role=img]")].filter(one => one.checkVisibility()).map(one => {
            const box = one.getBoundingClientRect();
            return [box.width, box.height, one.querySelectorAll("polyline, path, rect").length];
        })"""
    )
    if name != "hostile":
        assert len(boxes) >= 1
    assert all(width > 100 and height > 40 and shapes > 2 for width, height, shapes in boxes)


def serious(page: Any) -> list[tuple[str, list[str]]]:
    """What axe finds that keeps people out."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing; pip install '.[dev]'")
    found = axe.Axe().run(page).response
    assert len(found["passes"]) > 10  # it did look
    grave = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    return [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in grave]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(chromium, written, scheme):
    tab = Tab(chromium, scheme=scheme)
    page = tab.open(written["all"])
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    found = serious(page)
    tab.context.close()
    assert found == []


def test_axe_would_find_something(tab, written):
    page = tab.open(written["running"])
    page.evaluate("document.querySelectorAll('svg').forEach(one => one.removeAttribute('aria-label'))")
    assert [name for name, _ in serious(page)] == ["svg-img-alt"]


@pytest.mark.parametrize("name", ["all", "compare", "measure", "plan", "running", "hostile"])
def test_a_phone_shows_the_page_without_scrolling_sideways(chromium, written, name):
    tab = Tab(chromium, PHONE, "dark")
    width, inner = tab.open(written[name]).evaluate("[document.documentElement.scrollWidth, innerWidth]")
    tab.context.close()
    assert width <= inner


def test_curves_can_be_read_with_the_keyboard_and_turned_to_steps(tab, written):
    page = tab.open(written["running"])
    chart = page.locator("svg[aria-label^='Training loss']").first
    chart.focus()
    chart.press("End")
    assert page.locator(".readout").first.inner_text().startswith("9,6")  # of 300 steps of 32 samples
    page.get_by_label("step", exact=True).check()
    assert not chart.is_visible()
    assert page.locator("svg[aria-label^='Training loss']").nth(1).is_visible()


def test_on_paper_there_are_no_sliders_and_nothing_is_folded_or_dark(tab, written):
    page = tab.open(written["running"])
    assert not page.get_by_role("cell", name="momentum", exact=True).is_visible()  # in the recipe
    page.emulate_media(media="print", color_scheme="dark")
    assert page.get_by_role("cell", name="momentum", exact=True).is_visible()
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    page.emulate_media(media="screen")
    page = tab.open(written["plan"])
    assert page.locator(".sliders").is_visible()
    page.emulate_media(media="print")
    assert not page.locator(".sliders").is_visible()
    assert page.get_by_role("img").first.is_visible()


def inputs_at(random_numbers: random.Random) -> Inputs:
    """Some inputs of the planning model, of any size."""
    pick = random_numbers.uniform
    big = lambda low, high: 10 ** pick(low, high)  # noqa: E731
    optional = lambda value: None if random_numbers.random() < 0.3 else value  # noqa: E731
    return Inputs(
        worker_batch=random_numbers.randint(1, 4096), single_steps=big(0, 6), single_low=1.0, single_high=1e6,
        critical_batch=optional(big(0, 6)), critical_low=None, critical_high=None, lr=big(-5, 1),
        lr_power=random_numbers.choice([0.5, 1.0]), step_seconds=big(-5, 1), sample_seconds=big(-7, -1),
        parameter_bytes=int(big(3, 11)), latency_seconds=big(-7, -2), bytes_per_second=big(6, 12),
        device_speed=big(-1, 2), node_devices=random_numbers.randint(1, 8), node_latency_seconds=big(-7, -3),
        node_bytes_per_second=big(8, 12), overlap=pick(1, 10), input_samples_per_second=optional(big(1, 6)),
        largest_worker_batch=optional(random_numbers.randint(1, 4096)), price_per_hour=optional(big(-2, 2)),
        accuracy=optional(pick(0, 1)), measured_global_batch=random_numbers.randint(0, 10**5),
        race_samples=optional(pick(0.3, 1)), race_growth=pick(0, 0.6), race_least=random_numbers.randint(1, 100),
        race_steps=random_numbers.randint(0, 200),
    )  # fmt: skip


def assert_same_row(found: dict[str, Any], expected: model.Row) -> None:
    for name, value in asdict(expected).items():
        close = value if value is None or isinstance(value, str | bool) else pytest.approx(value, rel=0.01)
        assert found[name] == close, name


def test_the_page_reckons_as_the_planning_model_does(tab, written):
    page = tab.open(written["plan"])
    numbers = random.Random(0)
    cases = [(inputs_at(numbers), numbers.choice([1, 2, 3, 8, 100, 1024])) for _ in range(300)]
    found = page.evaluate(
        "cases => cases.map(([inputs, workers]) => scalewisePlan.row(inputs, workers))",
        [[asdict(inputs), workers] for inputs, workers in cases],
    )
    for row, (inputs, workers) in zip(found, cases, strict=True):
        assert_same_row(row, model.row(inputs, workers))


def test_sliders_change_the_numbers_as_the_planning_model_does(tab, written):
    page = tab.open(written["plan"])
    stored = json.loads((FOLDERS / "plan" / "plan.json").read_text())
    shown = lambda name: json.loads(page.locator(".planner").get_attribute(f"data-{name}"))  # noqa: E731
    assert_same_row(shown("row"), model.row(Inputs(**stored["inputs"]), stored["recommended"]["workers"]))
    assert shown("row")["seconds"] == pytest.approx(stored["recommended"]["seconds"], rel=0.01)
    seen = {page.locator(".said").inner_text()}
    for slider, key in (
        ("workers", "ArrowRight"),
        ("price_per_hour", "End"),
        ("bytes_per_second", "Home"),
        ("single_steps", "PageUp"),
    ):
        page.locator(f".sliders input[name={slider}]").press(key)
        seen.add(page.locator(".said").inner_text())
        inputs = Inputs(**{field.name: shown("inputs")[field.name] for field in fields(Inputs)})
        assert_same_row(shown("row"), model.row(inputs, shown("row")["workers"]))
    assert len(seen) == 5  # each slider changed what is said
    assert shown("row")["workers"] == 8
    assert shown("inputs")["price_per_hour"] == pytest.approx(100)
    assert shown("inputs")["bytes_per_second"] == pytest.approx(1.25e6)
    assert shown("inputs")["latency_seconds"] == parse_link("10mbit").latency_seconds  # as plan --link has it
    steps = page.locator("[data-fact=steps]").inner_text()
    assert int(steps.replace(",", "")) == shown("row")["steps"]
    assert tab.wrong == []


def test_the_target_slider_follows_the_single_worker_curve(tab, tmp_path):
    document = json.loads((FOLDERS / "plan" / "plan.json").read_text())
    document["curve"] = [{"step": 100, "value": 0.8}, {"step": 200, "value": 0.9}, {"step": 449, "value": 0.98}]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    pages.report([tmp_path], tmp_path / "plan.html")
    page = tab.open(tmp_path / "plan.html")
    assert (
        tab.page.locator(".planner")
        .get_attribute("data-inputs")
        .count(f'"single_steps":{document["inputs"]["single_steps"]:g}')
    )
    page.locator(".sliders input[name=target]").press("Home")
    assert json.loads(page.locator(".planner").get_attribute("data-inputs"))["single_steps"] == pytest.approx(
        100, rel=0.01
    )


def test_a_run_is_followed_as_it_trains_and_runs_are_compared(tab, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text(
            json.dumps({"task": "digits", "recipe": {"workers": 8, "worker_batch": 32}})
        )
        write_steps(tmp_path / name, 5)
    with Serving(tmp_path) as serving:
        page = tab.page
        page.goto(serving.url)
        page.get_by_role("link", name="a", exact=True).click()
        page.get_by_text("at step 5 the training loss").wait_for()
        page.locator("details.numbers").first.evaluate("one => { one.open = true; }")
        page.locator("#state").get_by_text("live").wait_for()
        write_steps(tmp_path / "a", 9)
        page.get_by_text("at step 9 the training loss").wait_for()
        assert page.locator("details.numbers").first.evaluate("one => one.open")  # as it was left
        page.goto(serving.url)
        for name in ("a", "b"):
            page.get_by_label(f"choose {name}").check()
        page.get_by_role("button").click()
        page.get_by_text("How do these 2 runs compare?").wait_for()
        assert serious(page) == []
        assert page.locator("svg g[data-name=b] polyline").count() > 0
        assert tab.wrong == []
        assert all(address.startswith((serving.url, "data:")) for address in tab.asked)
