"""What a run leaves on the disk, and how it comes back.

    folder      the run folder: recipe, environment, records, result
    checkpoint  the training state of all processes, written whole or not at all
    shards      the files of a checkpoint, read without trusting them

Public: `RunFolder`, `checkpoint.save`, `checkpoint.load_newest`, `checkpoint.save_emergency`, `holding`. Imports
the rest of the engine; nothing else of the engine imports it.
"""
