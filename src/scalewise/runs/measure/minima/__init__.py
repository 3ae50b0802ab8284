"""How sharp a minimum is, and the loss between the weights of two runs."""
