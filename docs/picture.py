"""Draw docs/demo.svg: what `make demo` really prints, on a terminal of 100 columns."""

import io
import os
import pty
import re
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
COLUMNS, ROWS = 100, 60


def printed_by(command: list[str]) -> str:
    """Everything that a command writes to a terminal."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(command[0], command)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the other end was closed
            break
        if not part:
            break
        parts.append(part)
    os.waitpid(child, 0)
    return b"".join(parts).decode()


def without_progress(text: str) -> str:
    """Drop what was drawn over again, and words about files that no longer exist."""
    lines = [line.split("\r")[-1] for line in text.replace("\r\n", "\n").split("\n")]
    cleaned = [re.sub(r"\x1b\[\??[0-9]*[A-HJKhl]", "", line) for line in lines]
    return "\n".join(line for line in cleaned if not re.match(r"\s*(\x1b\[[0-9;]*m)*(step [\d,]+|run  )", line))


def main() -> None:
    text = without_progress(printed_by([sys.executable, str(HERE.parent / "examples" / "demo.py")]))
    last = text.index("── eight workers, on two processes")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text[last:].strip("\n")))
    drawn = console.export_svg(title="make demo (its last run)")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # fonts of the reader's machine, no network
    (HERE / "demo.svg").write_text(drawn)


if __name__ == "__main__":
    main()
