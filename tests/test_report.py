"""The page: what it says of real folders, and that nothing in a folder can become part of its markup."""

from __future__ import annotations

import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scalewise.cli import main
from scalewise.present import page
from scalewise.present.charts import Axis, Mark, Scale, Series, fitted, line_chart, thinned
from scalewise.present.stored import Stored, find_runs, read_document, read_records, read_run

FOLDERS = Path(__file__).parent / "folders"
LARGEST_PAGE = 1_500_000
VOID = {"meta", "link", "input", "br"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real runs, made by the command: one worker, and eight with the rate of one."""
    folder = tmp_path_factory.mktemp("runs")
    for name, workers in (("one", "1"), ("eight", "8")):
        recipe = ["--recipe", "plain", "--epochs", "4", "--threads", "1", "--processes", "1", "--quiet"]
        command = ["train", "digits", "--workers", workers, *recipe, "--out", str(folder / name)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["scalewise"])
            with pytest.raises(SystemExit, match="0"):
                main(command)
    return folder


class Outline(HTMLParser):
    """Checks that tags are closed in order, and collects what matters."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(filter(None, self.words))

    def count(self, tag: str, **wanted: str) -> int:
        return sum(name == tag and wanted.items() <= found.items() for name, found in self.tags)


def outline(*folders: Path) -> Outline:
    text = page.page(folders)
    assert len(text.encode()) < LARGEST_PAGE
    return Outline(text)


def test_a_run_leaves_its_page(trained):
    for name in ("one", "eight"):
        shown = Outline((trained / name / "report.html").read_text())
        assert "How well" in shown.text
        assert json.loads((trained / name / "result.json").read_text())["weights_sha256"][:8] in shown.text
        for heading in ("Curves", "What the doctor says", "Recipe", "Environment"):
            assert heading in shown.text


def test_the_page_of_a_run_has_curves_by_samples_and_steps_noise_and_reasons(trained):
    shown = outline(trained / "eight")
    result = json.loads((trained / "eight" / "result.json").read_text())
    assert f"{100 * result['test']['accuracy']:.2f} %" in shown.text
    labels = [found["aria-label"] for tag, found in shown.tags if tag == "svg" and "aria-label" in found]
    assert [label.split(",")[0] for label in labels] == [
        *["Training loss", "Accuracy by epoch", "Learning rate"] * 2, "Noise scale",
    ]  # fmt: skip
    assert "loss against samples seen" in labels[0]
    assert "loss against step" in labels[3]
    assert "global batch 256" in labels[6]
    assert shown.count("svg", role="img") == shown.count("details", **{"class": "numbers"})  # each has its numbers


def test_runs_beside_each_other_are_diagnosed_against_the_single_worker(trained):
    shown = outline(trained / "one", trained / "eight")
    assert "How do these 2 runs compare?" in shown.text
    assert "eight: the learning rate was not adapted" in shown.text
    assert "Other runs are compared with one, of one worker." in shown.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "compare",
            ["which remedy brings it back?", "Worse than one worker, beyond seed noise: naive", "against single"],
        ),
        ("compare-many", ["Test error against global batch", "auto at 16 workers", "What the remedies cost in speed"]),
        (
            "measure",
            [
                "How far can digits scale?",
                "Up to 3 workers of 32",
                "The hyperbola",
                "Memory by part",
                "Throughput of one worker",
            ],
        ),
        ("measure-sweep", ["Steps to the loss", "Samples to the loss", "the law through them", "they agree"]),
        ("forecast", ["An error of 0.02 takes 897 (580 to ∞) samples", "→ 1,840"]),
        ("plan", ["How many workers are worth it for digits?", "4 workers: 1.2 s instead of", "What if?", "torchrun"]),
        (
            "plan",
            ["80 % interval", "0.7 to 1.6 s", "▶ ~4", "Several workers: the rate by adascale, warm-up 0 epochs"],
        ),
    ],
)
def test_stored_documents_tell_their_story(name, expected):
    shown = outline(FOLDERS / name)
    for words in expected:
        assert words in shown.text
    assert not re.search(r"\b(None|nan|inf|Stored)\b", shown.text)


def test_profiles_and_benches_are_drawn(tmp_path):
    spans = [
        {
            "process": process,
            "name": name,
            "start_seconds": 0.01 * place,
            "worked_seconds": 0.008,
            "waited_seconds": 0.002,
        }
        for process in (0, 1)
        for place, name in enumerate(("forward", "backward"))
    ]
    phases = [{"name": "forward", "worked_seconds": 0.01, "waited_seconds": 0.0, "share": 0.5}]
    profile = {"task": "digits", "step_seconds": 0.02, "phases": phases, "bottleneck": "backward", "timeline": spans}
    used = [{"seconds": 0.0, "value": 1.0}, {"seconds": 1.0, "value": 0.5}]
    profile["over_time"] = [{"process": "0", "processor_over_time": used, "memory_over_time": []}]
    rows = [
        {"processes": count, "efficiency": 0.9 ** (count - 1), "compute_seconds": 0.01, "communication_seconds": 0.002}
        for count in (1, 2, 4)
    ]
    for name, document in (("profile", profile), ("bench", {"kind": "scaling", "rows": rows})):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.json").write_text(json.dumps(document))
    shown = outline(tmp_path / "profile", tmp_path / "bench")
    for words in (
        "Timeline of a step",
        "process 1",
        "Most of it goes into backward",
        "4 processes reach 73 %",
        "cores used",
    ):
        assert words in shown.text
    assert (
        shown.count("rect", **{"class": "fill"}) == 1 + 1 + 8 + 3 + 2 + 12 + 4
    )  # phases, spans with waits, parts of steps; and keys


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028'\"&{{7*7}}"


def hostile(folder: Path) -> Path:
    """A folder in which every text is an attack and every number absurd."""
    folder.mkdir(parents=True)
    recipe = {"workers": 8, "worker_batch": 10**400, HOSTILE: HOSTILE, "lr": float("inf"), "optimizer": HOSTILE}
    derived = [{"field": HOSTILE, "value": {"deep": [HOSTILE]}, "reason": HOSTILE}, 7, None]
    (folder / "recipe.json").write_text(
        json.dumps({"task": HOSTILE, "settings": [HOSTILE], "recipe": recipe, "derived": derived})
    )
    (folder / "env.json").write_text(json.dumps({HOSTILE: HOSTILE, "model": {"parameters": float("nan")}}))
    values = [1e308, -1e308, float("nan"), float("inf"), 0, "7", None, True, [1], 10**309]
    steps = [
        {"kind": "step", "step": place, "samples": value, "loss": value, "lr": value, "noise_scale": value}
        for place, value in enumerate(values)
    ]
    epochs = [{"kind": "epoch", "samples": 7, "step": 1, "train": {HOSTILE: 0.5, "loss": 1}, "validation": HOSTILE}]
    lines = [*map(json.dumps, [*steps, *epochs, {"kind": "failure", "reason": HOSTILE}]), "[" * 100_000, "torn {"]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "result.json").write_text(
        json.dumps({"test": {HOSTILE: 1e99}, "steps": "many", "seconds": -1e400, "noise_scale": []})
    )
    return folder


def attacked(document: object) -> object:
    """The same document with every text an attack."""
    if isinstance(document, dict):
        return {name: attacked(value) for name, value in document.items()}
    if isinstance(document, list):
        return [attacked(value) for value in document]
    return HOSTILE if isinstance(document, str) else document


def blown_up(document: object) -> object:
    """The same document with every number absurd."""
    if isinstance(document, dict):
        return {name: blown_up(value) for name, value in document.items()}
    if isinstance(document, list):
        return [blown_up(value) for value in document]
    return 1e99 if isinstance(document, float) else -(10**99) if type(document) is int else document


def assert_harmless(shown: Outline) -> None:
    assert shown.count("img") == 0
    assert [found.get("type") for tag, found in shown.tags if tag == "script"].count(None) == 1
    for _, found in shown.tags:
        assert not any(name.startswith("on") or name in ("src", "style") for name in found)
    assert "<script>alert(1)</script>" in shown.text  # as text


def test_a_hostile_run_is_shown_as_text(tmp_path):
    shown = outline(hostile(tmp_path / "run"))
    assert_harmless(shown)
    assert "{{7*7}}" in shown.text
    assert "1 lines of metrics.jsonl are torn" in shown.text


@pytest.mark.parametrize("name", ["compare", "compare-many", "measure", "measure-sweep", "plan", "forecast"])
def test_hostile_documents_are_shown_as_text(tmp_path, name):
    kind = name.partition("-")[0]
    document = json.loads((FOLDERS / name / f"{kind}.json").read_text())
    for change in (attacked, blown_up, lambda found: attacked(blown_up(found))):
        shutil.rmtree(tmp_path / kind, ignore_errors=True)
        (tmp_path / kind).mkdir()
        (tmp_path / kind / f"{kind}.json").write_text(json.dumps(change(document)))
        shown = outline(tmp_path / kind)
        if change is not blown_up:
            assert_harmless(shown)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "7", '"text"', "{}", '{"rows": 7, "stages": {"a": 1}, "timeline": [[]]}']
)
@pytest.mark.parametrize(
    "name", ["recipe.json", "compare.json", "measure.json", "plan.json", "profile.json", "bench.json"]
)
def test_broken_documents_make_a_page_that_says_so(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    shown = outline(tmp_path)
    if not content.startswith("{") or content == "{":
        assert f"{name} is not a JSON object" in shown.text


def test_torn_records_are_left_out_and_said(tmp_path):
    good = json.dumps({"kind": "step", "step": 1})
    file = tmp_path / "metrics.jsonl"
    file.write_text(f"{good}\n{good[:9]}\n{good}\n{good[:9]}")
    found, problem = read_records(file, tmp_path)
    assert len(found) == 2
    assert problem == "1 lines of metrics.jsonl are torn and were left out"
    file.write_text(f"{good}\n{good[:9]}")
    assert read_records(file, tmp_path)[1] == ""


def test_of_huge_records_every_so_many_steps_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("scalewise.present.stored.LARGEST_RECORDS", 1000)
    steps = [json.dumps({"kind": "step", "step": step}) for step in range(200)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*steps, json.dumps({"kind": "epoch", "step": 200}), ""]))
    found, problem = read_records(tmp_path / "metrics.jsonl", tmp_path)
    assert len([one for one in found if one.text("kind") == "step"]) == pytest.approx(30, abs=8)
    assert found[-1].text("kind") == "epoch"
    assert "one of" in problem


def test_files_that_lead_out_of_the_folder_are_not_read(tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text('{"task": "secret"}')
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "compare.json").symlink_to(secret)
    assert read_document(folder / "compare.json", folder) == (Stored(), "compare.json is not a file of this folder")
    assert "secret" not in outline(folder).text.replace("secret.json", "")


def test_stored_values_are_what_they_are_asked_for_or_nothing():
    stored = Stored(json.loads('{"a": {"b": 1.5}, "nan": NaN, "huge": 1e999, "text": "x", "list": [1, null, "2"]}'))
    assert stored.number("a", "b") == 1.5
    assert [stored.number(name) for name in ("nan", "huge", "text", "a", "missing")] == [None] * 5
    assert stored.numbers("list") == [1.0, None, None]
    assert stored.text("a") == ""
    assert stored.parts("a", "b") == []


def test_half_characters_and_subnormal_numbers_make_a_page(tmp_path):
    shutil.copytree(FOLDERS / "trained", tmp_path / "half")
    recipe = tmp_path / "half" / "recipe.json"
    recipe.write_text(recipe.read_text().replace('"linear"', '"lin\\ud800ear"'))
    shutil.copytree(FOLDERS / "measure", tmp_path / "small")
    measured = json.loads((tmp_path / "small" / "measure.json").read_text())
    measured["training"][0]["low"] = 1e-320
    (tmp_path / "small" / "measure.json").write_text(json.dumps(measured))
    page.report([tmp_path / "half", tmp_path / "small"], tmp_path / "page.html")
    assert "lin?ear" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_scales_go_from_numbers_to_places():
    assert Scale(0, 10, 100, 200)(2.5) == 125
    assert Scale(1, 100, 0, 2, log=True)(10) == pytest.approx(1)
    assert fitted([5.0], Axis("x"), 0, 1).ticks() != []
    assert fitted([-3.0, 0.0], Axis("x", log=True), 0, 1).ticks() != []


def test_labels_of_lines_are_not_written_over_each_other():
    marks = [
        Mark("x", 400, "power law from here"),
        Mark("x", 24_000, "little to gain from here"),
        Mark("x", 99_000, "b"),
    ]
    points = ((100.0, 1.0), (100_000.0, 0.1))
    figure = line_chart("Error", Axis("samples", log=True), Axis("error", log=True), [Series("one", points)], marks)
    heights = re.findall(r'class="label \w+" x="[\d.]+" y="(\d+)"', str(figure.drawing))
    assert heights[0] != heights[1]
    assert heights[0] == heights[2]  # where there is room the first line does


def test_a_logarithmic_axis_has_three_numbers_or_more():
    assert len(Scale(118.0, 310.0, 0, 1, log=True).ticks()) > 2


def test_many_points_are_thinned_to_means_and_ranges():
    series = thinned([(float(place), float(place % 2)) for place in range(1000)], 100)
    assert len(series.points) == 100
    assert {value for _, value in series.points} == {0.5}
    assert {(low, high) for _, low, high in series.band} == {(0.0, 1.0)}


def test_a_page_that_cannot_be_written_does_not_fail_the_run(tmp_path):
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "report.html").mkdir()
    assert "could not be written" in page.leave(tmp_path)


def test_runs_are_found_newest_first_and_not_within_each_other(tmp_path):
    for place, name in enumerate(("old", "new", "deep/er", "compared")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "recipe.json").write_text("{}")
        os.utime(tmp_path / name / "recipe.json", (place, place))
    (tmp_path / "compared" / "inner").mkdir()
    (tmp_path / "compared" / "inner" / "recipe.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    assert [*find_runs(tmp_path)] == ["compared", "deep/er", "new", "old"]


def test_the_command_writes_and_says_where(scalewise_here, trained, tmp_path):
    done = scalewise_here("report", trained / "one", trained / "eight", "--out", "both.html", "--json")
    assert done.json["bytes"] == (tmp_path / "both.html").stat().st_size
    assert "report both.html" in done.stderr
    assert scalewise_here("report", trained / "one", "--out", "both.html").code == 0  # a page may be made anew


def test_mistakes_are_one_clear_line(scalewise_here, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "recipe.json").write_text("{}")
    for arguments, words in (
        (["missing"], "found no folder missing"),
        (["empty"], "found none of them in empty"),
        (["runs"], "scalewise report runs/a, or look at all with scalewise serve runs"),
        (["runs/a", "--out", "no/such/page.html"], "does not exist; create it first"),
        (["runs/a", "--out", "no/report.html"], "does not exist; create it first"),
        (["runs/a", "--out", "empty"], "--out must be a file"),
        (["runs/a", "--out", "runs/a/recipe.json"], "--out must be a new file or a page of scalewise"),
    ):
        done = scalewise_here("report", *arguments)
        assert done.code == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1


def test_the_page_of_a_run_that_goes_on_says_how_far_it_is(trained, tmp_path):
    shutil.copytree(trained / "eight", tmp_path / "going")
    (tmp_path / "going" / "result.json").unlink()
    assert "no result yet; at step" in outline(tmp_path / "going").text
    assert read_run(tmp_path / "going").kind == "train"


def test_a_run_that_failed_leaves_a_page_that_says_why(scalewise_here, tmp_path):
    done = scalewise_here(
        "train", "digits", "--lr", "1e9", "--workers", "1", "--threads", "1", "--out", "run", "--quiet"
    )
    assert done.code == 1
    shown = Outline((tmp_path / "run" / "report.html").read_text())
    assert "It failed: the loss" in shown.text
