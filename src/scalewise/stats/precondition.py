"""The coordinates in which an Adam-like optimizer is plain gradient descent.

Adam moves by P·g with P = 1 ÷ (√v̂ + ε), element by element. In the coordinates w ÷ √P that is a step along their own
gradient, √P·g, and the noise scale there is tr(PΣ) ÷ GᵀPG: McCandlish et al.'s simple form, which takes the curvature
to be alike in all directions, under the very assumption that preconditioning is meant to make true. (Dividing g by the
whole of √v̂ + ε would take the curvature to be alike *before* it.)

A coordinate that hardly ever gets a gradient has v̂ near 0, and the few gradients it does get would outweigh all
others: on the task `mlp` such coordinates took the noise scale from 500 to 116,000 within 100 steps. What is known of
their v̂ is the chance of a few rare samples. So v̂ counts as at least a hundredth of its mean over the tensor: then no
coordinate weighs more than ten times what one of average v̂ does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from scalewise.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

ADAM_LIKE = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "LAMB", "ScheduleFree"})  # of torch's and scalewise's own
LEAST_SHARE = 0.01  # of the tensor's mean v̂


def preconditioner(second_moment: Tensor, steps: float, beta2: float, epsilon: float) -> Tensor:
    """√P, what a gradient is multiplied by: 1 ÷ √(√v̂ + ε), v̂ being at least a hundredth of its mean.

    Arguments:
        second_moment: the running average of squared gradients, v.
        steps: how many it has seen, from which v̂ = v ÷ (1 − β₂^steps).
        beta2, epsilon: the optimizer's.
    """
    unbiased = second_moment / (1 - beta2**steps)
    return (unbiased.clamp(min=LEAST_SHARE * unbiased.mean()).sqrt() + epsilon).rsqrt()


def check_adam_like(optimizer: Optimizer) -> None:
    """Refuse an optimizer that has no second moments to precondition with.

    Of others than torch's and scalewise's that is known once they have a state, at the latest after their first step.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith(("torch.optim.", "scalewise.optim."))
    has_betas = all("betas" in group and "eps" in group for group in optimizer.param_groups)
    if not has_betas or (known and kind.__name__ not in ADAM_LIKE):
        raise _not_adam_like(optimizer)
    for state in optimizer.state.values():
        _check_state(state, optimizer)


def _check_state(state: Mapping[str, object], optimizer: Optimizer) -> None:
    if state and not ("exp_avg_sq" in state and "step" in state):
        raise _not_adam_like(optimizer)


def _not_adam_like(optimizer: Optimizer) -> UsageError:
    return UsageError(
        f"a preconditioned noise scale needs an Adam-like optimizer (betas and eps, and for every parameter a step and "
        f"an exp_avg_sq), got a {type(optimizer).__name__}; leave optimizer= out to measure plain gradients"
    )


def preconditioner_of(parameter: Tensor, optimizer: Optimizer) -> Tensor | None:
    """√P of one parameter from its optimizer's state; None before the first step."""
    state = optimizer.state.get(parameter) or {}
    _check_state(state, optimizer)
    if not state:
        return None
    group = next(group for group in optimizer.param_groups if any(parameter is one for one in group["params"]))
    return preconditioner(state["exp_avg_sq"], float(state["step"]), float(group["betas"][1]), float(group["eps"]))
