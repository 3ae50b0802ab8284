"""Tasks: the type, the built-in ones, and the loader. Importing this imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltIn:
    """A task that comes with scalewise."""

    factory: str
    summary: str
    data: str


BUILT_IN: dict[str, BuiltIn] = {
    "digits": BuiltIn(
        "scalewise.tasks.digits:digits",
        "8×8 digits, small CNN (--set bn=true, dropout=0.2)",
        "embedded, 1,797 images",
    ),
    "mlp": BuiltIn("scalewise.tasks.digits:mlp", "8×8 digits, two hidden layers", "embedded, 1,797 images"),
    "linear": BuiltIn("scalewise.tasks.generated:linear", "linear regression", "generated"),
    "logistic": BuiltIn("scalewise.tasks.generated:logistic", "logistic regression, two classes", "generated"),
    "chars": BuiltIn(
        "scalewise.tasks.chars:chars",
        "character transformer, bits per character",
        "embedded, 148 kB of Lewis Carroll",
    ),
}
