"""`scalewise serve`."""

from __future__ import annotations

import json as to_json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from scalewise.engine.processes import signals
from scalewise.errors import Interrupted
from scalewise.present import terminal


def serve(
    folder: Path,
    /,
    *,
    port: int = 0,
    open: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
    quiet: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Show the runs in a folder in a browser, live: follow a run as it trains, look at several side by side.

    scalewise serve runs
    scalewise serve runs --port 8700 --open

    Only this machine can connect (127.0.0.1), and only with the token in the printed address. Nothing is written,
    nothing outside the folder is read, and nothing in it is run. Ctrl-C ends it.

    Arguments:
        folder: A folder of run folders, at most four deep.
        port: Where to listen; by default a port that is free.
        open: Open the list in a browser.
        json: Print the address as one JSON document on stdout once it is served.
        quiet: Draw nothing.
    """
    from scalewise.present import server

    def ready(address: str) -> None:
        if json:
            print(to_json.dumps({"url": address, "folder": str(folder)}), flush=True)
        console = terminal.console(quiet)
        console.print(f"serving {folder} at\n{address}", markup=False, soft_wrap=True)
        console.print("only this machine can open it, with this address; Ctrl-C ends it", style="dim")
        if open:
            import webbrowser

            webbrowser.open(address)

    number = server.serve(folder, port, ready)
    raise Interrupted(f"{signals.name(number)} ended the server", number)
