"""What the notebooks in `labs/` share: checked answers, figures, and the notebooks themselves.

Needs `pip install scalewise[labs]`. `python -m scalewise.labs my-folder` writes the notebooks there.
May import: everything, as a user's notebook does. Public: the names below.
"""

from scalewise.labs.drawing import COLORS, animate, figures, show, table
from scalewise.labs.files import code, measured, program, scalewise, write
from scalewise.labs.questions import check

__all__ = [
    "COLORS",
    "animate",
    "check",
    "code",
    "figures",
    "measured",
    "program",
    "scalewise",
    "show",
    "table",
    "write",
]
