"""The terminal, rendered at a fixed width and compared as text."""

from __future__ import annotations

import io

from rich.console import Console

from scalewise.present import live, terminal
from scalewise.present.stored import Stored
from scalewise.present.stories.train import result_story
from scalewise.present.story import Story
from scalewise.recipe import Derived
from scalewise.records import Epoch, Result, Step


def rendered(thing: object, width: int = 90) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(thing)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def result(**changes: object) -> Result:
    values = {
        "run": "runs/digits-1", "task": "digits", "workers": 8, "processes": 2, "threads": 1, "worker_batch": 32,
        "global_batch": 256, "steps": 56, "epochs": 9.976, "samples": 14336, "optimizer": "momentum",
        "lr": {"base": 0.02, "peak": 0.16}, "train": {"loss": 0.0647, "accuracy": 0.982}, "validation": None,
        "test": {"loss": 0.0625, "accuracy": 0.98056}, "seconds": 75.2, "samples_per_second": 20304.2, "exact": True,
        "weights_sha256": "875e843920bc0c86" + "0" * 48,
        "noise_scale": {"value": 152.3, "low": 111.0, "high": 1279.4, "enough": False},
    }  # fmt: skip
    return Result(**(values | changes))


def story(**changes: object) -> Story:
    return result_story(Stored(result(**changes).to_json()))


def test_the_story_of_a_training():
    assert terminal.text(story(), 100) == (
        "How well do 8 workers learn digits?\n"
        "Test accuracy 98.06 % after 56 steps in 1 min 15 s. The noise scale of 152 samples says that each\n"
        "sample of a global batch of 256 is worth 37 % of one in a very small one.\n"
        "\n"
        "workers         8 × 32  global batch 256, on 2 processes, 1 thread each\n"
        "optimizer       momentum  peak LR 0.16\n"
        "steps           56  9.976 epochs, 14,336 samples\n"
        "time            1 min 15 s  20,304 samples/s\n"
        "train accuracy  98.20 %  loss 0.0647\n"
        "test accuracy   98.06 %  loss 0.0625\n"
        "noise scale     152 samples  95 %: 111 to 1,280; not enough steps for a firm value\n"
        "weights         exact  sha256 875e843920bc0c86…, the same on any number of processes\n"
        "run             runs/digits-1"
    )


def test_noise_that_is_missing_or_unbounded():
    def noise(**changes: object) -> str:
        (fact,) = [fact for fact in story(**changes).facts if fact.name == "noise scale"]
        return f"{fact.value}; {fact.note}"

    assert noise(noise_scale=None) == "not measured; it needs two or more workers, or --micro-batch"
    unknown = {"value": None, "low": None, "high": None, "enough": False}
    assert noise(noise_scale=unknown).startswith("not known yet; the gradient is not separated from its noise")
    assert noise(noise_scale={"value": 15.36, "low": 4.0, "high": None, "enough": False}).startswith(
        "15.4 samples; 95 %: 4 to ∞; not enough steps"
    )


def test_epoch_lines_stand_under_their_titles():
    record = Epoch(
        6, 1.069, 1536, 0.1, {"loss": 2.2, "accuracy": 0.25}, {"loss": 2.0, "accuracy": 1.0}, True, 1.0, 500.0
    )
    assert rendered(live.epoch_header(record)) == (
        "  epoch     step  train loss  accuracy  validation loss  accuracy  samples/s"
    )
    assert rendered(live.epoch_line(record)) == (
        "   1.07        6         2.2   25.00 %                2  100.00 %        500  best"
    )


def test_derived_lines():
    lines = [*live.derived_lines([Derived("lr_rule", "linear", "because [of it]")])]
    assert rendered(lines[0]) == "auto  lr_rule = linear  because [of it]"


def test_a_bar_is_drawn_on_a_terminal_only():
    view = live.TrainingView(quiet=False, steps=10, total=320.0, done=0.0)
    view.console.file = io.StringIO()
    with view.live():
        view.show(Step(1, 0.1, 8, 0.1, 2.0, {}, 0.1))
    assert view.console.file.getvalue() == ""


def test_the_bar_shows_loss_metric_rate_and_speed():
    view = live.TrainingView(quiet=False, steps=10, total=320.0, done=0.0)
    first = view._numbers(Step(1, 0.1, 100, 0.05, 2.0, {"accuracy": 0.5}, 1.0))
    second = view._numbers(Step(2, 0.2, 300, 0.05, 1.5, {"accuracy": 0.75}, 1.5))
    assert first == "loss 2, accuracy 50.00 %  LR 0.05"
    assert second == "loss 1.5, accuracy 75.00 %  LR 0.05  400 samples/s"


def test_many_epochs_get_no_more_lines_than_a_screen_has():
    view = live.TrainingView(quiet=False, steps=None, total=1000.0, done=0.0)
    view.console = Console(file=io.StringIO(), width=100)
    for epoch in range(1, 101):
        view.show(Step(epoch, epoch, epoch, 0.1, 2.0, {}, 0.1, progress=10.0 * epoch))
        view.show(Epoch(epoch, epoch, epoch, 0.1, {"loss": 1.0}, None, epoch == 51, 1.0, 100.0))
    shown = [line.split()[0] for line in view.console.file.getvalue().splitlines()[1:]]
    assert len(shown) <= live.EPOCH_LINES + 2
    assert (shown[0], shown[-1]) == ("1.00", "100.00")
    assert "51.00" in shown
