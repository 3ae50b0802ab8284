"""How many workers? Records in, a plan over workers, time, money and accuracy out.

May import `engine` and below, and no torch: a plan reads records, never a model.

- `records`: what earlier measurements and runs say. `assemble`: from that to the inputs of the model.
- `model`: the closed formulas of a row. `hardware`: links, prices and speeds of what is planned for.
- `document`: the plan, its choice and its JSON. `jobs`: the command line and job files of a row.
"""
