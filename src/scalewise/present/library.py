"""What a server shows: the list of runs and their pages, made once for every state that their files are in."""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from scalewise.present import page
from scalewise.present.folders import Kind, Run, changed, document_name, find_runs, fingerprint, kind_of, read_run
from scalewise.present.stored import read_document
from scalewise.present.stories import forecast, measure, plan
from scalewise.present.stories.train import outcome
from scalewise.present.words import number

KEPT_PAGES, KEPT_LINES = 16, 4_000
MOST_CHOSEN = 50  # runs on one page
ANSWERS = {"plan": plan.answer, "forecast": forecast.answer, "measure": measure.answer}


class Refused(Exception):
    """A request that gets no page."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(frozen=True)
class Line:
    """A run in the list."""

    name: str
    kind: Kind
    said: str
    ended: bool
    changed: str


class Library:
    """The runs in one folder. Names come from anyone and are looked up, never trusted."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._pages: OrderedDict[tuple[tuple[str, ...], str], bytes] = OrderedDict()
        self._lines: OrderedDict[tuple[str, object], tuple[str, bool]] = OrderedDict()

    def names(self) -> dict[str, Kind]:
        """All runs, newest first; the folder itself if it is one."""
        own = kind_of(self.root)
        return {name: kind for name, kind in find_runs(self.root).items() if _is_text(name)} | (
            {".": own} if own else {}
        )

    def folder(self, name: str) -> Path:
        """The folder of a run, which must really be in ours."""
        try:
            path = (self.root / name).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise Refused(404, "there is no such run") from None
        if not path.is_relative_to(self.root) or kind_of(path) is None:
            raise Refused(404, "there is no such run")
        return path

    def version(self, names: tuple[str, ...]) -> str:
        """What changes whenever a page would: of the chosen runs, or of the list for none."""
        chosen = names or tuple(self.names())
        state = [(name, fingerprint(self.root / name)) for name in chosen]
        return hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    def page(self, names: tuple[str, ...]) -> bytes:
        """The page of the chosen runs, or the list for none."""
        if len(names) > MOST_CHOSEN:
            raise Refused(400, f"at most {MOST_CHOSEN} runs fit on a page")
        folders = [self.folder(name) for name in names]
        key = names, self.version(names)
        if key not in self._pages:
            self._pages[key] = (self._runs(names, folders) if names else self._list()).encode()
            while len(self._pages) > KEPT_PAGES:
                self._pages.popitem(last=False)
        self._pages.move_to_end(key)
        return self._pages[key]

    def _runs(self, names: tuple[str, ...], folders: list[Path]) -> str:
        runs = [read_run(folder, name, self.root) for name, folder in zip(names, folders, strict=True)]
        query = page.query(names)
        title = ", ".join(names)
        return page.render(title, page.stories(runs, self.root), title, live=f"events?{query}", home="./")

    def _list(self) -> str:
        lines = [self._line(name, kind) for name, kind in self.names().items()]
        return page.fill(
            "list.html",
            title=self.root.name,
            sources=self.root.name,
            lines=lines,
            policy=page.policy(live=True),
            live="events",
        )

    def _line(self, name: str, kind: Kind) -> Line:
        path = self.root / name
        key = name, fingerprint(path)
        if key not in self._lines:
            document, _ = read_document(path / document_name(kind), self.root)
            recipe, _ = read_document(path / "recipe.json", self.root)
            run = Run(name, path, kind, document, recipe)
            self._lines[key] = _said(run), document.is_object
            while len(self._lines) > KEPT_LINES:
                self._lines.popitem(last=False)
        said, ended = self._lines[key]
        return Line(name, kind, said, ended, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed(path))))


def _said(run: Run) -> str:
    """One line on a run, from its document alone: records may be long."""
    if run.kind in ANSWERS:
        task, answer = run.document.text("task"), ANSWERS[run.kind](run.document)
        return f"{task}: {answer}" if task else answer
    if run.kind != "train":
        return " ".join(filter(None, [run.document.text("task"), run.document.text("kind")]))
    workers, task = run.recipe.number("recipe", "workers"), run.recipe.text("task") or "a run"
    said = task if workers is None else f"{task}, workers: {number(workers)}"
    return f"{said}; {outcome(run) if run.document.is_object else 'no result yet'}"


def _is_text(name: str) -> bool:
    """Whether a name can stand in an address."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
