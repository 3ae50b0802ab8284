"""`python -m scalewise.engine.processes MODULE:FUNCTION WORD…`: call a function in a process of its own."""

from __future__ import annotations

import sys
from importlib import import_module

if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    sys.exit(getattr(import_module(module), function)(*sys.argv[2:]))
