"""Every command and every Python block of the README and the documentation runs; documents.py says how."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cyclopts.exceptions import CycloptsError, MissingArgumentError

from conftest import environment, real_data
from documents import ROOT, Block, Command, blocks, pages
from forked import Forks
from scalewise.cli import app

SHELLS = {"sh", "console"}
LANGUAGES = SHELLS | {"python", "text", "json", "yaml"}
BLOCKS = {block.name: block for page in pages() for block in blocks(page)}
RUN = [name for name, block in BLOCKS.items() if block.language in SHELLS | {"python"}]


# What blocks may ask for: made once, then copied into the folder of the page that asks. ---------------------------

KEPT = {"--out", "--resume"}  # the rest of a page needs what such a command leaves: it is run on every page
TRAINED = {
    "runs/one": "train digits --out runs/one",
    "runs/eight": "train digits --workers 8 --recipe plain --processes 1 --out runs/eight",
}


def photos(folder: Path) -> None:
    """A folder of pictures per class."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for name in ("train/cats", "train/dogs", "test/cats", "test/dogs"):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            pixels = torch.randint(256, (40, 40, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")


def errors_table(file: Path) -> None:
    """Errors that follow a power law."""
    rows = [f"{size},{0.02 + 2 * size**-0.4:.5f}" for size in (1000, 2000, 4000, 8000, 16000, 32000)]
    file.write_text("\n".join(["samples,error", *rows]))


MADE: dict[str, Callable[[Path], object]] = {
    "runs/measured": lambda path: shutil.copytree(ROOT / "tests" / "folders" / "measure", path),
    "photos": photos,
    "errors.csv": errors_table,
    "examples": lambda path: shutil.copytree(ROOT / "examples", path),
    "my_task.py": lambda path: shutil.copy(ROOT / "examples" / "simple_task.py", path),
    "data": lambda path: path.symlink_to(real_data()),
}


@dataclass
class Site:
    """Folders and names of pages, and what has been run in them."""

    folder: Path
    forks: Forks
    namespaces: dict[Path, dict[str, Any]] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    said: set[tuple[str, ...]] = field(default_factory=set)

    def run_until(self, wanted: Block) -> None:
        """Run a page's blocks up to this one, each once."""
        for name in RUN:
            block = BLOCKS[name]
            if block.page == wanted.page and block.line <= wanted.line and name not in self.done:
                self.done[name] = "failed"
                self.run(block)
                self.done[name] = "ran"
        assert self.done[wanted.name] == "ran", f"{wanted.name} ran before, and failed"

    def run(self, block: Block) -> None:
        place = self.folder / block.page.relative_to(ROOT).with_suffix("")
        place.mkdir(parents=True, exist_ok=True)
        for name in block.given:
            self.give(name, place)
        with contextlib.chdir(place):
            if block.language == "python":
                exec(compile(block.text, block.name, "exec"), self.namespaces.setdefault(block.page, {}))
                return
            for command in block.commands():
                self.command(command, place)

    def give(self, name: str, place: Path) -> None:
        """Put something that was made beforehand into a page's folder."""
        if (place / name).exists():
            return
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        if name in MADE:
            MADE[name](place / name)
            return
        if not (self.folder / name).exists():
            assert self.scalewise(TRAINED[name].split(), self.folder)[0] == 0
        shutil.copytree(self.folder / name, place / name)

    def command(self, command: Command, place: Path) -> None:
        """Run one command as its reader would, or see that its words can be."""
        program, *arguments = command.words
        if command.only_parsed:
            PARSED[program](arguments)
        elif command.stopped:
            served(arguments, place)
        elif made := [name for name, words in TRAINED.items() if words == " ".join(arguments)]:
            self.give(made[0], place)
        elif tuple(arguments) not in self.said or KEPT & {*arguments}:
            code, said = RUNNERS[program](self, arguments, place)
            assert code == command.code, f"{command.text}\nas {shlex.join(command.words)}\nended with {code}:\n{said}"
            self.said.add(tuple(arguments))

    def scalewise(self, arguments: list[str], place: Path) -> tuple[int, str]:
        return self.forked("scalewise", arguments, place)

    def python(self, arguments: list[str], place: Path) -> tuple[int, str]:
        return self.forked("script", arguments, place)

    def torchrun(self, arguments: list[str], place: Path) -> tuple[int, str]:
        return self.forked("torchrun", ["--standalone", *arguments], place)

    def forked(self, program: str, arguments: list[str], place: Path) -> tuple[int, str]:
        files = self.folder / "said"
        files.mkdir(exist_ok=True)
        code = self.forks.run(arguments, place, outside(), files, timeout=270, program=program)
        return code, (files / "stderr").read_text()


RUNNERS = {
    "scalewise": Site.scalewise,
    ".venv/bin/scalewise": Site.scalewise,
    "python": Site.python,
    "torchrun": Site.torchrun,
}


def outside() -> dict[str, str]:
    """The environment of a command: no browser opens."""
    return environment() | {"BROWSER": "true"}


def served(arguments: list[str], place: Path) -> None:
    """Ask a server for its page, then stop it as its user would."""
    command = [sys.executable, "-m", "scalewise", *arguments, "--json"]
    with subprocess.Popen(command, cwd=place, env=outside(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = json.loads(process.stdout.readline())["url"]
            assert urllib.request.urlopen(address, timeout=30).status == 200
        finally:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


# What cannot be run here is at least read: the words must be right. ------------------------------------------------


def scalewise_words(arguments: list[str]) -> None:
    """A command line that the program takes."""
    try:
        app.parse_args(arguments, print_error=False, exit_on_error=False)
    except CycloptsError as error:
        pytest.fail(f"scalewise {shlex.join(arguments)}: {error}")


def torchrun_words(arguments: list[str]) -> None:
    """A command line that torchrun takes, around one that scalewise takes."""
    from torch.distributed.run import get_args_parser

    read = get_args_parser().parse_args(arguments)
    assert read.nnodes != "1", "torchrun on one machine can be run"
    assert read.module
    assert read.training_script == "scalewise"
    scalewise_words(read.training_script_args)


def make_words(arguments: list[str]) -> None:
    """Targets that the Makefile has."""
    for target in arguments:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def pre_commit_words(arguments: list[str]) -> None:
    """There is something to install."""
    assert arguments == ["install"]
    assert yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


def pip_words(arguments: list[str]) -> None:
    """Extras that the package has, and a file of constraints that is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[([\w,-]+)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"]), extras
    if "-c" in arguments:
        assert (ROOT / arguments[arguments.index("-c") + 1]).is_file()


def shell_file(arguments: list[str]) -> None:
    """A script that a shell can read, in the page's folder."""
    subprocess.run(["bash", "-n", Path(arguments[-1])], check=True)
    assert "torchrun" in Path(arguments[-1]).read_text()


def yaml_file(arguments: list[str]) -> None:
    """A job file that can be read, in the page's folder."""
    assert yaml.safe_load(next(Path(word) for word in arguments if word.endswith(".yaml")).read_text())


PARSED = {
    "torchrun": torchrun_words,
    "make": make_words,
    ".venv/bin/pre-commit": pre_commit_words,
    "pip": pip_words,
    "sbatch": shell_file,
    "kubectl": yaml_file,
    "sky": yaml_file,
}


# The tests. -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Site:
    return Site(tmp_path_factory.mktemp("pages"), forks)


@pytest.mark.timeout(900)  # some blocks are a dozen commands
@pytest.mark.parametrize("name", RUN)
def test_the_block_runs(name, site):
    site.run_until(BLOCKS[name])


def commands() -> list[Command]:
    return [command for block in BLOCKS.values() if block.language in SHELLS for command in block.commands()]


def test_what_is_not_run_says_why_and_cannot_be_run_here():
    for command in commands():
        program = command.words[0]
        if command.only_parsed is None:
            assert program in RUNNERS, f"nothing runs {command.text!r}; say why: only parsed because …"
        else:
            assert program in PARSED, f"{command.text!r} can be run, so it must be"
            assert len(command.only_parsed.split()) > 2, command.text
        if command.stopped:
            assert command.text.startswith("scalewise serve"), f"{command.text!r} ends by itself"


def test_every_command_of_the_program_has_an_example():
    shown = " ".join(command.text for command in commands())
    for name in (name for name in app if not name.startswith("-")):
        assert f"scalewise {name}" in shown, name


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_says_its_language_and_hides_no_command(name):
    block = BLOCKS[name]
    assert block.language in LANGUAGES or block.language.startswith("{"), f"{name}: {block.language or 'no language'}"
    if block.language == "text":
        first = block.text.strip().split(" ")[0]
        assert first not in RUNNERS | PARSED, f"{name} is a command: mark it sh"


def prose(page: Path) -> str:
    """A page without its blocks."""
    return re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_a_program_that_a_page_shows_is_whole():
    """From a line named by what it says, as numbers of lines change; and nothing is cut off in the middle."""
    shown = [
        (page, *found)
        for page in pages()
        for found in re.findall(r"^```{literalinclude} (\S+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert shown
    for page, target, words in shown:
        options = dict(re.findall(r"^:([\w-]+): (.+)$", words, re.MULTILINE))
        assert options.keys() <= {"language", "start-at", "end-before", "pyobject"}, f"{page}: {target}"
        text = (page.parent / target).read_text()
        begin = text.index(options.get("start-at", text[:1]))
        end = text.index(options["end-before"]) if "end-before" in options else len(text)
        compile(text[begin:end], target, "exec")
        assert not re.search("^(import|from) ", text[:begin], re.MULTILINE), f"{page}: imports of {target} are hidden"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_sentences_are_commands(page):
    for text in re.findall(r"`scalewise ([a-z][^`]*)`", prose(page)):
        words = shlex.split(" ".join(text.split()))
        assert words[0] in app, f"{page}: scalewise {text}"
        if not re.search(r"[…|\[]", text) and len(words) > 1:
            with contextlib.suppress(MissingArgumentError):  # a sentence may leave the task out
                app.parse_args(words, print_error=False, exit_on_error=False)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_named_are_there(page):
    text = prose(page)
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)\s#]+)", text):
        assert (page.parent / target).exists(), f"{page}: link to {target}"
    if page.name == "log.md":  # a diary may name what is gone
        return
    for target in re.findall(r"`((?:benchmarks|docs|examples|labs|src|tests)/[\w./-]*)`", text):
        assert (ROOT / target).exists(), f"{page}: {target}"


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    inside = {"cwd": ROOT, "env": os.environ | environment(), "capture_output": True, "text": True}
    done = subprocess.run([*command, "-d", tmp_path / "doctrees", "docs", tmp_path / "html"], **inside, timeout=280)
    assert done.returncode == 0, done.stderr
    for page in ("index", "start", "reference/cli", "reference/api"):
        assert (tmp_path / "html" / f"{page}.html").is_file()
    written = "".join(path.read_text() for path in (tmp_path / "html").rglob("*.html"))
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', written), "a page fetches something"
