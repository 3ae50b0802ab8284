"""Do all processes still hold the same weights? Silent faults of memory or processors show here.

The fingerprint is the sum of the weights' bytes, read as 64-bit words, modulo 2⁶⁴. A change of one word always changes
it; changes of several cancel out with a chance of 2⁻⁶⁴. It costs one pass over the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from scalewise.engine.sums.tree import workers_of
from scalewise.errors import ReplicasDiffer


def fingerprint(weights: Tensor) -> list[int]:
    """The sum of a flat vector's words as two numbers of 32 bits, which a float64 holds.

    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([1.0, 2.0]))
    True
    >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([1.0, -2.0]))
    False
    """
    total = int(weights.detach().view(torch.int64).sum())
    return [total & 0xFFFFFFFF, (total >> 32) & 0xFFFFFFFF]


def check(fingerprints: Sequence[Sequence[float]], workers: int, step: int, since: int) -> None:
    """Refuse fingerprints, by process, that differ after `step`; they were last the same after step `since`."""
    values = [tuple(value) for value in fingerprints]
    usual, _ = Counter(values).most_common(1)[0]
    others = [process for process, value in enumerate(values) if value != usual]
    if not others:
        return
    names = ", ".join(f"{process} ({workers_of(process, len(values), workers)})" for process in others)
    which = f"process {names} differs" if len(others) == 1 else f"processes {names} differ"
    raise ReplicasDiffer(
        f"all processes must hold the same weights, but after step {step} {which} from the others; after step {since} "
        f"they were equal: a fault of memory or a processor, or different code on some process; stored checkpoints "
        f"were compared when written and are good: continue with --resume"
    )
