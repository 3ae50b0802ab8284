"""Write the notebooks: `python -m scalewise.labs my-folder`."""

from __future__ import annotations

import sys
from pathlib import Path

from scalewise.errors import ScalewiseError


def main(arguments: list[str]) -> int:
    """The exit code: 0, or 2 with one line that says what to do."""
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print("usage: python -m scalewise.labs [FOLDER]   (scalewise-labs without FOLDER)", file=sys.stderr)
        return 0 if arguments[0] in ("-h", "--help") else 2
    try:
        from scalewise.labs.files import write

        written = write(Path(arguments[0] if arguments else "scalewise-labs"))
    except ModuleNotFoundError as error:
        print(f"the labs need {error.name}, which is not installed; pip install 'scalewise[labs]'", file=sys.stderr)
        return 2
    except ScalewiseError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"the notebooks need a folder that can be written, got {error}; name another one", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    print(f"open them with: jupyter lab {written[0].parent}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
