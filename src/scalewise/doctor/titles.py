"""What each cause is called by people."""

TITLES = {
    "non-finite": "steps that are not finite",
    "diverged": "the loss ran away",
    "same-data": "workers see the same data",
    "replicas-drifted": "the copies of the model drifted apart",
    "wrong-averaging": "uneven parts are averaged alike",
    "overlapping-shards": "shards overlap",
    "unshuffled": "the data are not shuffled",
    "schedule-too-fast": "the schedule runs too fast",
    "schedule-too-slow": "the schedule runs too slowly",
    "warm-up-missing": "no warm-up",
    "lr-not-adapted": "the learning rate was not adapted",
    "too-few-steps": "too few steps for the global batch",
    "worker-batch-too-small": "worker batch too small for batch norm",
    "statistics-lag": "batch-norm statistics lag behind",
}
