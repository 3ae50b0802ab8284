"""The part of a traceback that a user wrote."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

OURS = Path(__file__).parent
STANDARD = Path(sysconfig.get_path("stdlib"))


def user_frames(error: BaseException) -> str:
    """The frames of the user's own files and the message; libraries' and our frames are left out."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    lines = [f"  {frame.filename}:{frame.lineno} in {frame.name}\n    {frame.line}\n" for frame in frames]
    return "".join(lines) + f"{type(error).__name__}: {error}"


def _is_users(filename: str) -> bool:
    path = Path(filename)
    library = "site-packages" in path.parts or "dist-packages" in path.parts or filename.startswith("<frozen")
    return not library and not {OURS, STANDARD} & {*path.parents}
