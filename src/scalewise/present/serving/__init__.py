"""The page, live: a small server of run folders for the person at this machine."""
