"""How much data for a target? A power law through errors in, with its intervals and what it does not know."""
