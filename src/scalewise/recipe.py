"""The recipe: how a task is learned, frozen and complete. The placement is not part of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scalewise.errors import RecipeError
from scalewise.files import parse_json, read_bytes

OptimizerName = Literal[
    "sgd", "momentum", "nesterov", "adam", "adamw", "lars", "lamb", "muon", "soap", "schedule-free"
]  # fmt: skip
LrRule = Literal["none", "linear", "sqrt", "adascale"]
ScheduleName = Literal["constant", "cosine", "linear", "step", "growth"]
RecipeMode = Literal["auto", "plain"]

# the step's length does not grow with the gradient's
ADAPTIVE = frozenset({"adam", "adamw", "lamb", "muon", "soap", "schedule-free"})
USUAL_LR: dict[str, float] = {  # nearly the best for `digits` at its worker batch of 32 (docs/log.md)
    "sgd": 0.2,
    "momentum": 0.02,
    "nesterov": 0.02,
    "adam": 0.002,
    "adamw": 0.002,
    "lars": 1.0,  # these two are relative changes: of a thousandth of a layer's own norm, and of all of it
    "lamb": 0.01,
    "muon": 0.003,
    "soap": 0.003,
    "schedule-free": 0.005,
}
GROWTH = 8  # of the noise over a whole training beside its first steps; 0.5 to 17, mostly 1 to 9, in results/*-auto.md
CHANGEABLE_ON_RESUME = frozenset({"epochs", "steps", "patience", "target"})


class Recipe(BaseModel):
    """How a task is learned.

    >>> Recipe(workers=8, worker_batch=64).global_batch
    512
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    workers: int = Field(1, ge=1, description="Logical workers, each with its own share of the data")
    worker_batch: int = Field(32, ge=1, description="Samples per worker per step")
    micro_batch: int | None = Field(
        None, ge=1, description="Samples per forward pass, to save memory; must divide worker-batch"
    )
    epochs: float = Field(
        5.0, gt=0, description="Budget in passes over the training data, of one worker; auto may take more"
    )
    steps: int | None = Field(
        None,
        ge=1,
        description="Updates of the weights, overrides epochs; of one worker with AdaScale, of equal size with growth",
    )
    optimizer: OptimizerName = Field("momentum", description="Optimizer of the weights")
    lr: float = Field(0.05, ge=0, description="Learning rate of one worker, before lr-rule")
    lr_rule: LrRule = Field(
        "none",
        description="Scaling of the peak rate for N workers: 1, N, √N, or the gain measured in each step (adascale)",
    )
    warmup_epochs: float = Field(0.0, ge=0, description="Epochs of linear warm-up to the peak rate")
    schedule: ScheduleName = Field(
        "constant",
        description="Learning rate after warm-up, as a function of progress; growth raises the global batch where "
        "step lowers the rate",
    )
    drop: int = Field(10, ge=2, description="Factor by which step lowers the rate, or growth raises the global batch")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of momentum, nesterov, lars and muon")
    beta1: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="First-moment decay of adam, adamw, lamb, soap and muon's adamw; weight of x in schedule-free's y",
    )
    beta2: float = Field(
        0.999, ge=0, lt=1, description="Second-moment decay of adam, adamw, lamb, soap, schedule-free and muon's adamw"
    )
    epsilon: float = Field(
        1e-8, gt=0, description="Denominator offset of adam, adamw, lamb, soap, schedule-free and muon's adamw"
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay, as the optimizer defines it")
    trust_coefficient: float = Field(
        0.001, gt=0, description="Share of its own norm by which a layer moves at rate 1 (lars)"
    )
    adapt_vectors: bool = Field(False, description="Also adapt and decay biases and norm weights (lars, lamb)")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Label smoothing of the training loss")
    clip_norm: float | None = Field(None, gt=0, description="Clip the norm of the global gradient to this value")
    batch_norm: str = Field(
        "worker",
        pattern=r"^(worker|sync|ghost:[1-9][0-9]*)$",
        description="Batch-norm statistics over a worker's micro batch (worker), N of its samples (ghost:N), or the "
        "micro batches of all workers (sync)",
    )
    statistics: Literal["auto", "running", "recomputed"] = Field(
        "auto",
        description="Batch-norm statistics at evaluation: running averages, or recomputed from training samples; auto "
        "recomputes while steps are few",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Numeric precision; bf16 runs the forward pass under autocast"
    )
    compile: bool = Field(False, description="Compile the model with torch.compile")
    layout: Literal["contiguous", "channels_last"] = Field("contiguous", description="Memory layout of images")
    threads: int | None = Field(None, ge=1, description="Threads per process; they change the bytes of the result")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of start weights, sample order, dropout and augmentation")
    patience: int | None = Field(
        None,
        ge=1,
        description="Stop after this many epochs without a better validation metric; restore the best weights",
    )
    target: float | None = Field(None, description="Stop when the validation metric reaches this value")

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401  (any input; validated here, once)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise RecipeError(describe(error)) from None

    @model_validator(mode="after")
    def _parts_divide(self) -> Self:
        if self.worker_batch % self.rows:
            raise ValueError(
                f"micro_batch must divide worker_batch, got {self.micro_batch} and {self.worker_batch}; "
                f"choose a divisor of {self.worker_batch}"
            )
        if self.ghost_batch and self.rows % self.ghost_batch:
            raise ValueError(
                f"batch_norm ghost:N needs N to divide the samples that go through the model at once "
                f"({self.rows}), got ghost:{self.ghost_batch}; choose a divisor of {self.rows}"
            )
        if self.optimizer == "schedule-free" and not self.beta1:
            raise ValueError("schedule-free needs beta1 above 0, got 0: x could not be found from y; use --beta1 0.9")
        if self.lr_rule == "adascale" and self.schedule == "growth":
            raise ValueError(
                "schedule growth and lr_rule adascale cannot be combined; choose another --schedule or --lr-rule"
            )
        return self

    @property
    def rows(self) -> int:
        """Samples that go through the model at once: the micro batch."""
        return self.micro_batch or self.worker_batch

    @property
    def micro_batches(self) -> int:
        """Passes through the model that make one worker batch."""
        return self.worker_batch // self.rows

    @property
    def global_batch(self) -> int:
        """Samples per step over all workers."""
        return self.workers * self.worker_batch

    @property
    def ghost_batch(self) -> int | None:
        """Samples per batch-norm group, or None when the whole micro batch is one group."""
        return int(self.batch_norm.removeprefix("ghost:")) if self.batch_norm.startswith("ghost:") else None

    @property
    def selects(self) -> bool:
        """Whether training looks at validation data to decide something."""
        return self.patience is not None or self.target is not None

    @property
    def lr_factor(self) -> float:
        """What the LR rule multiplies the single-worker rate by."""
        return {"linear": float(self.workers), "sqrt": math.sqrt(self.workers)}.get(self.lr_rule, 1.0)

    @property
    def step_progress(self) -> int:
        """Progress of a step, in single-worker samples; under AdaScale that of a gain of 1."""
        return self.worker_batch if self.lr_rule == "adascale" else self.global_batch

    def total_steps(self, samples: int) -> int:
        """Steps over a training set of `samples`: round(epochs × N ÷ global batch), at least 1.

        Under AdaScale, which stops earlier, those of a single worker.
        """
        return self.steps or max(1, round(self.epochs * samples / self.step_progress))

    def replace(self, **changes: Any) -> Recipe:  # noqa: ANN401
        """A copy with some fields changed, validated again; only they count as newly given."""
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return Recipe(**(fields | changes))

    def save(self, path: Path) -> None:
        """Write every field as JSON."""
        path.write_text(json.dumps(self.model_dump(), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Recipe:
        """Read what `save` wrote, or what a person wrote by hand."""
        try:
            content = read_bytes(path)
            text = content.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe file {path} must be readable text: {error}; check the path") from None
        try:
            fields = parse_json(content)
        except json.JSONDecodeError as error:
            raise RecipeError(
                f"recipe file {path} must be JSON, line {error.lineno}: {error.msg}; correct that line"
            ) from None
        except ValueError as error:
            raise RecipeError(f"recipe file {path} must be JSON: {error}; correct it") from None
        fields = fields.get("recipe", fields) if isinstance(fields, dict) else fields  # as in a run's recipe.json
        if not isinstance(fields, dict):
            raise RecipeError(
                f"recipe file {path} must hold a JSON object of recipe fields, got {type(fields).__name__}"
            )
        try:
            return cls(**fields)
        except RecipeError as error:
            raise RecipeError(f"{path}{_line_of(str(error), text)}: {error}") from None


def describe(error: ValidationError) -> str:
    """Turn pydantic's report into one line: the field, what was required, what came."""
    parts = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        if not field:
            parts.append(item["msg"].removeprefix("Value error, "))
        elif item["type"] == "extra_forbidden":
            parts.append(f"{field}: unknown recipe field; the fields are {', '.join(Recipe.model_fields)}")
        else:
            rule = item["msg"].replace("Input should be", "must be")
            if item["type"] == "string_pattern_mismatch":  # of batch_norm alone
                rule = "must be worker, sync or ghost:N"
            parts.append(f"{field} {rule}, got {item['input']!r}; change --{field.replace('_', '-')}")
    return "; ".join(parts)


def _line_of(message: str, text: str) -> str:
    field = message.split(":")[0].split(" ")[0]
    lines = (number for number, line in enumerate(text.splitlines(), 1) if f'"{field}"' in line)
    return f", line {number}" if (number := next(lines, None)) else ""


@dataclass(frozen=True)
class Derived:
    """A recipe value that was not given, and the reason for it."""

    field: str
    value: float | int | str | bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As it stands in `derived` of the result."""
        return asdict(self)


@dataclass(frozen=True)
class Trial:
    """A candidate of auto's race: a short training, and its loss on held-out data."""

    name: str
    lr: float
    steps: int
    samples: int
    seconds: float
    loss: float | None  # on held-out data; None where it diverged
    train_loss: float | None = None  # on what it trained on, at the end
    halfway: tuple[float, float] | None = None  # both losses after half of the steps, of a trial of twice the steps


@dataclass(frozen=True)
class Search:
    """What auto trained before step 0, beside the run's own steps: the trials of its race, or a pilot."""

    steps: int
    samples: int
    seconds: float
    noise_scale: float | None = None  # samples, of the pilot; None where it could not be separated from infinity
    trials: tuple[Trial, ...] = ()
    epochs: float | None = None  # of one worker, that the race started from

    def to_json(self) -> dict[str, Any]:
        """As it stands in `search` of the result."""
        return {"steps": self.steps, "samples": self.samples, "seconds": self.seconds}


def resolve(
    base: Recipe,
    given: dict[str, Any],
    mode: RecipeMode | None,
    cores: int,
    samples: int | None = None,
    pilot: Search | None = None,
) -> tuple[Recipe, list[Derived]]:
    """Complete a recipe: the task's own, then what was given, then what follows from it.

    Arguments:
        base: the task's single-worker recipe, or a loaded one.
        given: fields set by the user; they always win.
        mode: `auto` derives the rest when there are several workers, `plain` changes nothing else.
        cores: processor cores, for the default number of threads.
        samples: size of the training set, for a warm-up when the budget is given in steps.
        pilot: what was measured, where auto needs it (`adapts`).
    """
    recipe = base.replace(**given)
    derived: list[Derived] = []
    if (mode or "auto") == "auto" and (rate := fitting_lr(base, given)):
        recipe = recipe.replace(lr=rate.value)
        derived.append(rate)

    def derive(field: str, value: float | int | str, reason: str) -> None:
        nonlocal recipe
        recipe = recipe.replace(**{field: value})
        derived.append(Derived(field, value, reason))

    if pilot is not None and samples is not None:
        derive("lr_rule", "adascale", _gain_reason(recipe, pilot))
        derived.append(_needed_samples(recipe, samples, pilot))
    elif recipe.workers > 1 and (mode or "auto") == "auto":
        _derive_rates(recipe, derive, samples)
    if recipe.threads is None:
        if recipe.workers > 1:
            derive("threads", 1, "several workers: each computes on one core, so processes can share them")
        else:
            derive("threads", cores, "one worker: all cores of this machine")
    return recipe, derived


def adapts(recipe: Recipe) -> bool:
    """Whether auto chooses optimizer, rate and number of steps; with any of rule, growth or steps given it does not."""
    given = "lr_rule" in recipe.model_fields_set or recipe.schedule == "growth"
    return recipe.workers > 1 and recipe.steps is None and not given


def _gain_reason(recipe: Recipe, pilot: Search) -> str:
    power = "the root of the gain" if recipe.optimizer in ADAPTIVE else "the gain"
    noise = "not separated from infinity" if pilot.noise_scale is None else f"{pilot.noise_scale:,.0f} samples"
    return (
        f"a step of {recipe.workers} workers is worth {_gain(recipe, pilot):.1f} steps of one as training begins "
        f"(noise scale {noise}); it is measured in every step, and {recipe.optimizer}'s rate follows {power}"
    )


def _needed_samples(recipe: Recipe, samples: int, pilot: Search) -> Derived:
    """How many samples training takes if the gain stays that of the pilot, and how many if the noise grows."""
    single = recipe.epochs * samples
    needed, least = (
        round(single * recipe.workers / _gain(recipe, pilot, growth)) + pilot.samples for growth in (1, GROWTH)
    )
    worth = _gain(recipe, pilot) / recipe.workers
    price, lower = f"{needed / single:.1f} times", f"{least / single:.1f} times"
    growing = "" if lower == price else f" if the noise stays as it is, {lower} if it grows {GROWTH}-fold"
    reason = (
        f"about {price} those of one worker{growing} (with the pilot's {pilot.samples:,}): each is worth "
        f"{100 * worth:.0f} % at first"
    )
    if worth < 0.5 and pilot.noise_scale is not None:
        enough = max(1, round(2 + pilot.noise_scale / recipe.worker_batch))
        reason = (
            f"{recipe.workers} workers are more than this task can use at the start: {reason}, and half up to about "
            f"{enough} workers"
        )
    return Derived("samples", needed, reason)


def _gain(recipe: Recipe, pilot: Search, growth: float = 1) -> float:
    """AdaScale's gain at `growth` times the pilot's noise scale B: (B ÷ b + 1) ÷ (B ÷ (N·b) + 1)."""
    if pilot.noise_scale is None:
        return float(recipe.workers)
    ratio = growth * pilot.noise_scale / recipe.worker_batch
    return (ratio + 1) / (ratio / recipe.workers + 1)


def _derive_rates(recipe: Recipe, derive: Any, samples: int | None) -> None:  # noqa: ANN401
    chosen = recipe.model_fields_set
    rule = recipe.lr_rule
    if "lr_rule" not in chosen:
        rule = fitting_rule(recipe)
        law = "grows with the root of the batch" if rule == "sqrt" else "grows with the batch"
        reason = f"{recipe.workers} workers average more noise away; {recipe.optimizer}'s rate {law}"
        derive("lr_rule", rule, reason)
    if "warmup_epochs" not in chosen and rule not in ("none", "adascale"):  # whose rate rises by what it measures
        derive("warmup_epochs", fitting_warmup(recipe, samples), "a scaled rate is too large for the first steps")


def fitting_lr(base: Recipe, given: dict[str, Any]) -> Derived | None:
    """The learning rate for an optimizer other than the task's own, where no rate was given.

    >>> found = fitting_lr(Recipe(optimizer="momentum", lr=0.05), {"optimizer": "sgd"})
    >>> found.value, found.reason
    (0.5, "momentum's 0.05 ÷ (1 − 0.9): the same length in the long run")
    >>> fitting_lr(Recipe(optimizer="adam", lr=0.002), {"optimizer": "adamw"}).value
    0.002
    """
    wanted = base.replace(**given)
    if "lr" in given or wanted.optimizer == base.optimizer:
        return None
    heavy, own = {"momentum", "nesterov"}, f"{base.optimizer}'s {base.lr:g}"
    for family in (heavy, {"adam", "adamw"}):
        if {base.optimizer, wanted.optimizer} <= family:
            return Derived("lr", base.lr, f"{own}: {wanted.optimizer} takes the same")
    if base.optimizer in heavy and wanted.optimizer == "sgd":
        lr = base.lr / (1 - base.momentum)
        return Derived("lr", round(lr, 10), f"{own} ÷ (1 − {base.momentum:g}): the same length in the long run")
    if base.optimizer == "sgd" and wanted.optimizer in heavy:
        lr = base.lr * (1 - wanted.momentum)
        return Derived("lr", round(lr, 10), f"{own} × (1 − {wanted.momentum:g}): the same length in the long run")
    reason = f"usual for {wanted.optimizer}; {own} is of another kind. --lr sets it"
    return Derived("lr", USUAL_LR[wanted.optimizer], reason)


def fitting_rule(recipe: Recipe) -> LrRule:
    """The LR rule that fits the optimizer: the square root for adaptive ones, else linear (Goyal et al. 2017).

    >>> fitting_rule(Recipe(optimizer="adam")), fitting_rule(Recipe(optimizer="momentum"))
    ('sqrt', 'linear')
    """
    return "sqrt" if recipe.optimizer in ADAPTIVE else "linear"


def fitting_warmup(recipe: Recipe, samples: int | None) -> float:
    """Epochs of warm-up: a tenth of the budget, at most 5.

    >>> fitting_warmup(Recipe(epochs=12.0), None)
    1.2
    """
    epochs = recipe.epochs
    if recipe.steps is not None and samples is not None:
        epochs = recipe.steps * recipe.global_batch / samples
    return round(min(5.0, epochs / 10), 4)


def differing_fields(stored: Recipe, wanted: Recipe) -> list[str]:
    """Fields that may not change on resume but do."""
    return [
        name
        for name in Recipe.model_fields
        if name not in CHANGEABLE_ON_RESUME and getattr(stored, name) != getattr(wanted, name)
    ]
