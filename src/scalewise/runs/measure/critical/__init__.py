"""The critical batch: the law, and its direct measurement by branches and sweeps."""
