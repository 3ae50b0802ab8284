"""How the mean gradient changes the weights: optimizer rules on stretches of the flat vector.

    optimizer    the recipe's optimizer on the weights that a process owns, and its state by parameter name
    layerwise    LARS and LAMB, whose steps follow norms of whole parameters

Public: `FlatOptimizer`, `StateEntry`, `owned_stretches`. Imports sums of the engine, and optim.
"""
