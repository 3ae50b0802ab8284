"""Which samples a worker gets, and with which random numbers: functions of the recipe, never of processes.

    streams     the order of samples, and a key for every random draw
    samples     training, validation and test samples, fetched by number
    feed        the batches of this process's workers, in the order in which steps need them
    loaders     loader processes, for data that are not in memory

Public: `SampleStream`, `Samples`, `open_samples`, `hold_out`, `Feed`. Imports tasks, schedules and what lies below;
nothing else of the engine.
"""
