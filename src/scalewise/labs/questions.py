"""Questions whose answers are checked: right answers are known here by their digest, or are computed.

A learner sets a variable and calls `check`; it says that the answer is right, or what to think of.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np

from scalewise.errors import UsageError

CLOSE = 1e-6
Learned = Callable[..., Any]


def is_line_gradient(answer: Learned) -> bool:
    """(dJ/dw, dJ/db) of J = mean((w·x + b − y)²) ÷ 2, at some random lines."""
    random = np.random.default_rng(1)
    for _ in range(5):
        (w, b), x, y = random.normal(size=2), random.normal(size=7), random.normal(size=7)
        error = w * x + b - y
        if not _close(answer(w, b, x, y), ((error * x).mean(), error.mean())):
            return False
    return True


def is_logistic_gradient(answer: Learned) -> bool:
    """(dJ/dw, dJ/db) of logistic regression's mean cross-entropy."""
    random = np.random.default_rng(2)
    x, w, b = random.normal(size=(9, 3)), random.normal(size=3), 0.3
    y = (random.random(9) < 0.5).astype(float)
    dz = 1 / (1 + np.exp(-(x @ w + b))) - y
    dw, db = answer(x, y, w, b)
    return _close(dw, x.T @ dz / 9) and _close(db, dz.mean())


def is_largest_batch(answer: float, fixed_bytes: float, sample_bytes: float, budget_bytes: float) -> bool:
    """The largest whole number of samples that fits."""
    return answer == math.floor((budget_bytes - fixed_bytes) / sample_bytes)


def is_ring_bytes(answer: Learned) -> bool:
    """2·(P − 1) ÷ P · bytes."""
    cases = [(1, 1000.0), (2, 1000.0), (8, 4096.0), (5, 1e6)]
    return all(_close(answer(size, processes), 2 * (processes - 1) / processes * size) for processes, size in cases)


def is_noise_scale(answer: Learned) -> bool:
    """trΣ ÷ |G|² from L, T, c groups of b samples."""
    cases = [(3.0, 2.0, 2, 4), (10.0, 4.0, 8, 16), (1.5, 1.0, 4, 32)]
    return all(
        _close(answer(each, mean, c, b), b * c * (each - mean) / (c * mean - each)) for each, mean, c, b in cases
    )


def is_warm_up(answer: Learned) -> bool:
    """The rate at some progress: from lr to lr·workers in a straight line over the warm-up, then constant."""
    cases = [(0.0, 1.0), (1.5, 4.5), (3.0, 8.0), (10.0, 8.0)]
    return all(_close(answer(lr, 8, 3.0, epochs), factor * lr) for lr in (0.001, 0.02) for epochs, factor in cases)


def is_planned_steps(answer: Learned) -> bool:
    """⌈S₁ ÷ gain⌉ of N workers."""

    def steps(single: float, workers: int, worker_batch: int, critical: float) -> int:
        gain = (1 + critical / worker_batch) / (1 + critical / (workers * worker_batch))
        return math.ceil(single / gain - 1e-9)

    cases = [(449, 1, 32, 100.0), (449, 8, 32, 100.0), (10_000, 16, 64, 900.0)]
    return all(answer(*case) == steps(*case) for case in cases)


def _close(found: object, expected: float | Sequence[float] | np.ndarray) -> bool:
    values, wanted = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    return values.shape == wanted.shape and bool(np.allclose(values, wanted, rtol=CLOSE, atol=CLOSE))


SIGNIFICANT_DIGITS = 3
TOLERANCE = 0.005  # of a number: rounding in the learner's head is no mistake
DIGEST_LENGTH = 16

State = Literal["open", "right", "wrong"]
MARKS: dict[State, str] = {"open": "○", "right": "✓", "wrong": "✗"}


@dataclass(frozen=True)
class Question:
    """What is known of a question."""

    kind: Literal["number", "choice", "function"]  # a choice is a letter
    think: str  # what to think of where an answer is wrong
    digest: str = ""  # of a right number or choice, unless a rule computes it
    rule: Callable[..., bool] | None = None  # whether an answer is right, given what the notebook measured


@dataclass(frozen=True)
class Verdict:
    """What is said about an answer."""

    state: State
    text: str


QUESTIONS: dict[str, Question] = {
    "1.1": Question(
        "function",
        "J is a mean of squares: the inner derivative of (w·x + b − y) is x for w and 1 for b, and the ½ cancels the "
        "2. Did you take the mean over the samples?",
        rule=is_line_gradient,
    ),
    "1.2": Question(
        "number",
        "a step takes one batch out of all samples of all epochs; round to the nearest whole step",
        "73e4de29b3f5f243",
    ),
    "1.3": Question(
        "choice",
        "the variance of a mean of B independent values falls as 1 ÷ B; the standard deviation is its root",
        "e151826b6221a8a3",
    ),
    "1.4": Question(
        "number",
        "along an eigenvector the error is multiplied by (1 − η·λ) in every step; the largest λ is the first to make "
        "that smaller than −1",
        "78ec77497af815e3",
    ),
    "2.1": Question(
        "function",
        "dJ/dz of sigmoid and cross-entropy together is very simple: the prediction minus the truth; then the mean "
        "over samples goes into dw = Xᵀ·dz and db",
        rule=is_logistic_gradient,
    ),
    "2.2": Question("number", "each layer has inputs × outputs weights, and one bias per output", "bd8ae7d4d67e0dc0"),
    "2.3": Question(
        "number", "without padding a k×k kernel takes k − 1 pixels off each side length", "ea61f8cbdf21d53b"
    ),
    "2.4": Question(
        "choice",
        "patience decides when to stop; which weights are worth keeping is another question",
        "6d240104e51df1ff",
    ),
    "3.1": Question(
        "number",
        "2·n³ FLOPs; three matrices of n² numbers of 4 bytes are touched; divide the first by the second",
        "76ae9ad7d817a2e4",
    ),
    "3.2": Question(
        "choice", "compare what the bus must carry per element with what is computed per element", "70e4459c088722dd"
    ),
    "3.3": Question(
        "number",
        "the fixed part is there whatever the batch; only what is left can be shared by samples, and there are no "
        "halves of samples",
        rule=is_largest_batch,
    ),
    "3.4": Question("number", "what is stored is that of one micro batch at a time", "f85b968f5025609f"),
    "4.1": Question(
        "function",
        "a ring sum is a reduce-scatter and an all-gather: in each of the two a process sends P − 1 parts, each 1 ÷ P "
        "of the bytes; with one process nothing is sent",
        rule=is_ring_bytes,
    ),
    "4.2": Question(
        "choice",
        "addition of floating-point numbers rounds after every +; which of the options changes the order of the +?",
        "24ecdb83c86815ef",
    ),
    "4.3": Question(
        "number",
        "P stages need P − 1 extra slots to fill and empty; the slots in all are M + P − 1",
        "eccbdb818a42e126",
    ),
    "4.4": Question(
        "choice",
        "the gradients' bytes do not depend on the worker batch, the activations' bytes grow with it",
        "39ddfd21f838b341",
    ),
    "5.1": Question(
        "function",
        "both estimates divide by (c − 1): the signal is (c·T − L), the noise b·c·(L − T); the noise scale is noise ÷ "
        "signal",
        rule=is_noise_scale,
    ),
    "5.2": Question("number", "a sample is worth 1 ÷ (1 + B ÷ B_crit)", "aeaad1e5bc96e954"),
    "5.3": Question("number", "S = S_min · (1 + B_crit ÷ B)", "1a9ed138d4307894"),
    "5.4": Question(
        "choice",
        "what stays the same when epochs are fixed is the number of samples; what becomes 8 times fewer?",
        "34026d4b4d4691c8",
    ),
    "6.1": Question(
        "function",
        "the rate rises in a straight line from lr (one worker's) at progress 0 to lr × workers at the end of the "
        "warm-up, and stays there",
        rule=is_warm_up,
    ),
    "6.2": Question(
        "number", "every step multiplies what is left of the start by the momentum: 0.99 · 0.99 · …", "a68be573074fd862"
    ),
    "6.3": Question(
        "number", "the ratio is ‖w‖ ÷ ‖update‖, and the update itself has the norm ‖update‖", "49c4adac9ccec521"
    ),
    "6.4": Question(
        "choice",
        "eight copies of one gradient have the mean of one; what would eight different ones have?",
        "5007b57dd1113569",
    ),
    "7.1": Question(
        "function",
        "divide S₁ by the gain (1 + B ÷ b) ÷ (1 + B ÷ (N·b)); a step cannot be taken in half: round up",
        rule=is_planned_steps,
    ),
    "7.2": Question("number", "every worker is paid for the whole time: workers × hours × price", "6080df51c0d5cccf"),
    "7.3": Question("number", "solve α·m^β = ε for m: m = (ε ÷ α)^(1 ÷ β)", "7ff597c141a6c06f"),
    "7.4": Question(
        "choice",
        "what no amount of data removes is γ: a target below it can only be met by changing what?",
        "4110e62ff4c29a5f",
    ),
}


def check(name: str, answer: Any, **seen: float) -> None:  # noqa: ANN401  (a learner may write anything)
    """Say whether an answer is right, or what to think of.

    The answer is None until one is given; `seen` is what the notebook measured, where the right one depends on it.

    >>> check("1.2", None)
    ○ 1.2 not answered yet: set the answer to a number
    """
    verdict = judge(name, answer, **seen)
    print(f"{MARKS[verdict.state]} {name} {verdict.text}")


def judge(name: str, answer: Any, **seen: float) -> Verdict:  # noqa: ANN401
    """The verdict on an answer."""
    if name not in QUESTIONS:
        raise UsageError(f"a question must be one of {', '.join(QUESTIONS)}, got {name!r}; correct the name")
    question = QUESTIONS[name]
    wanted = {"number": "a number", "choice": "a letter, such as 'a'", "function": "your function"}[question.kind]
    if answer is None:
        return Verdict("open", f"not answered yet: set the answer to {wanted}")
    number = not isinstance(answer, bool) and isinstance(answer, Real) and math.isfinite(answer)  # also numpy's
    if not {"number": number, "choice": isinstance(answer, str), "function": callable(answer)}[question.kind]:
        return Verdict("wrong", f"needs {wanted}, got {type(answer).__name__}")
    try:
        if question.rule is not None:
            right = question.rule(answer, **seen)
        elif question.kind == "choice":
            right = digest(name, answer.strip().lower()) == question.digest
        else:
            near = (answer * (1 - TOLERANCE), answer, answer * (1 + TOLERANCE))
            right = question.digest in {digest(name, f"{value:.{SIGNIFICANT_DIGITS}g}") for value in near}
    except Exception as error:  # a learner's function may do anything
        return Verdict("wrong", f"your function failed: {type(error).__name__}: {error}")
    return Verdict("right", "right") if right else Verdict("wrong", f"not yet; think of this: {question.think}")


def digest(name: str, answer: str) -> str:
    """What is stored of a right answer, each question's own.

    >>> digest("0.0", "a") == digest("0.1", "a")
    False
    """
    return hashlib.sha256(f"scalewise lab question {name}: {answer}".encode()).hexdigest()[:DIGEST_LENGTH]
