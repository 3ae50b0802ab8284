"""One file or folder per question: request in, result out. Stores, resumes, stops; public from Python.

May import: plan, doctor, engine, stats, tasks, nn, optim, schedules, recipe, records, errors, files, extras.
Public: a module per question, whose function of the same name takes the names of the command's flags, as in
`runs.replay.replay(run, step=120)`: `train` (whose function is `fit`), `compare`, `measure`, `plan`, `forecast`,
`profile`, `bisect`, `replay` and, in `bench`, `devices`, `collectives`, `scaling` and `parallelism`. Beside them `run`
(a run in its folder: the one place that trains and stores), `request` (what requests share) and `processes` (a question
that several processes answer together).
"""
