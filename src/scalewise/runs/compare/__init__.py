"""The table of remedies: one task, its single-worker recipe, and what people do about many workers, over seeds.

May import: what `runs` may.
Public: `compare.compare`, also as `scalewise.compare`, its `CompareRequest` and `CompareResult`. The way of a row
through the files: `rows` makes its recipe, `jobs` are its runs, `trainings` trains one of them in a process of the
pool, `comparison` keeps what comes out, and the table that it amounts to.
"""
