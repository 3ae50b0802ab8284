"""How workers' gradients become one mean, with the same bytes on any number of processes.

    tree        the fixed binary tree over worker numbers, in which every sum is taken
    flat        all gradients in one vector; the fold of workers into it; means and clipping
    grid        norms of ranges of that vector, on one grid of chunks
    reductions  from each process's sum to the sum of all: ordered, allreduce, server
    replicas    whether all processes still hold the same weights

Public: `FlatLayout`, `Fold`, `Reduction`, `own_plan`, `share`, `RangeNorms`, `reductions.build`. Imports placement and
processes.team of the engine; nothing of data, update or parallel.
"""
