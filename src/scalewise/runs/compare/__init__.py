"""The table of remedies: one task, its single-worker recipe, and what people do about many workers, over seeds."""
