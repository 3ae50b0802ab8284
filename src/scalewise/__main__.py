"""`python -m scalewise`."""

from scalewise.cli import main

main()
