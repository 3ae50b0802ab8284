"""Text that goes into a page without becoming part of its markup."""

from __future__ import annotations

import base64
import hashlib
import json

from markupsafe import Markup

# Within a script element only these could end it, begin a comment, or end a line of JavaScript.
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def embedded(value: object) -> Markup:
    """A JSON value for a script element of type application/json.

    >>> print(embedded({"name": "</script><b>"}))
    {"name": "\\u003c/script\\u003e\\u003cb\\u003e"}
    """
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    return Markup("".join(ESCAPES.get(character, character) for character in text))


def source(text: str) -> str:
    """The name by which a content security policy allows one style or script, and nothing else."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
