"""Take the pictures of real pages for the README: python docs/pages.py COMPARED MEASURED PLANNED (run folders)."""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from scalewise.present.page import write

HERE = Path(__file__).parent
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
WIDTH, MARGIN = 1000, 8


def part(page: Page, first: str, last: str, file: str) -> None:
    """A picture of everything from one element to another."""
    top, bottom = page.locator(first).first.bounding_box(), page.locator(last).first.bounding_box()
    assert top is not None
    assert bottom is not None
    height = bottom["y"] + bottom["height"] - top["y"] + 2 * MARGIN
    clip = {"x": 0, "y": top["y"] - MARGIN, "width": WIDTH, "height": height}
    page.screenshot(path=HERE / file, full_page=True, clip=clip)


def main(compared: str, measured: str, planned: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        wanted = (
            (compared, "h1", "section:has-text('The remedies')", "report-compare.png"),
            (
                measured,
                "h2:text('Steps and samples')",
                "h2:text('What more workers') + p + .blocks figure",
                "report-measure.png",
            ),
            (planned, "h2:text('What if?')", ".planner .drawings figure", "report-plan.png"),
        )
        for run, first, last, file in wanted:
            place = Path(folder) / "page.html"
            write([Path(run)], place)
            page.goto(place.as_uri())
            part(page, first, last, file)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
