"""The thorough search: the recipe with the fewest steps that is as good as one worker, proved over fresh seeds.

May import: what `runs` may.
Public: `tune.tune`, also as `scalewise.tune`, its `TuneRequest` and `TuneResult`. The way of a search:
`tune` checks it and trains with the pool of `compare`, `search` says what is tried and judges it, `tuning` keeps what
was found and writes it as JSON.
"""
