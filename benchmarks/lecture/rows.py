"""The lecture's six rows: what was published, and the recipes that repeat them on true shards and without shards."""

from __future__ import annotations

from dataclasses import dataclass

WORKERS, WORKER_BATCH, IMAGES = 8, 512, 50_000
EPOCHS, STEPS_PER_EPOCH = 12, {1: 97, WORKERS: 12}
WARM_UP_EPOCHS = 3

ADAM = ("--optimizer", "adam", "--lr", "0.001", "--epsilon", "1e-7")
LAMB = ("--optimizer", "lamb", "--lr", "0.001", "--epsilon", "1e-6", "--adapt-vectors")
SCALED = ("--lr-rule", "linear")  # × 8: 0.008
PLAIN = ("--set", "bn=false")
NORMALIZED = ("--set", "bn=true")


@dataclass(frozen=True)
class Row:
    """One row of the published table and the flags that repeat it."""

    name: str
    workers: int
    flags: tuple[str, ...]
    warms_up: bool
    published: tuple[float, float]  # training accuracy and loss of the last epoch

    @property
    def steps(self) -> int:
        """As many as the lecture took: a last, smaller step of an epoch was dropped there."""
        return EPOCHS * STEPS_PER_EPOCH[self.workers]

    def sharded(self) -> list[str]:
        """Every worker draws its own samples."""
        return self._command(WORKER_BATCH, self.workers * WORKER_BATCH)

    def unsharded(self) -> list[str] | None:
        """All workers draw the same samples: eight equal gradients of 512 samples make one.

        Eight workers with 64 samples each, and batch-norm statistics over all 512, are that one gradient.
        """
        if self.workers == 1:
            return None
        return [*self._command(WORKER_BATCH // self.workers, WORKER_BATCH), "--batch-norm", "sync"]

    def _command(self, worker_batch: int, global_batch: int) -> list[str]:
        size = ["--workers", str(self.workers), "--worker-batch", str(worker_batch), "--steps", str(self.steps)]
        rising = WARM_UP_EPOCHS * STEPS_PER_EPOCH[self.workers] * global_batch / IMAGES
        warm_up = ["--warmup-epochs", f"{rising:.6f}"] if self.warms_up else []
        return ["train", "cifar10", "--recipe", "plain", *self.flags, *size, *warm_up]


ROWS = (
    Row("1 worker, no BN", 1, (*ADAM, *PLAIN), False, (0.7153, 0.8085)),
    Row("8 naive, no BN", WORKERS, (*ADAM, *PLAIN), False, (0.4404, 1.5352)),
    Row("8 “batch norm”", WORKERS, (*ADAM, *NORMALIZED, *SCALED), True, (0.6416, 1.0059)),
    Row("8 scaled LR, BN", WORKERS, (*ADAM, *NORMALIZED, *SCALED), False, (0.5295, 1.2914)),
    Row("8 scaled LR + warm-up, BN", WORKERS, (*ADAM, *NORMALIZED, *SCALED), True, (0.6450, 1.0108)),
    Row("8 LAMB, BN", WORKERS, (*LAMB, *NORMALIZED, *SCALED), True, (0.8092, 0.5630)),
)
