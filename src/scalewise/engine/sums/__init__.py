"""The fixed tree, the flat vector, the chunk grid, and the reductions over processes."""
