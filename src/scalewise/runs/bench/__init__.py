"""How fast training runs, on one machine and on several."""
