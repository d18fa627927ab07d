"""``python -m harli_cli``, and the command ``harli``."""

from __future__ import annotations

import sys


def start() -> None:
    """Run the command line; an interrupt while it is still being imported is one line too."""
    try:
        from harli_cli.main import main  # noqa: PLC0415  (inside what catches interrupts)
    except KeyboardInterrupt:
        sys.stderr.write("harli: interrupted\n")
        sys.exit(130)
    main()


if __name__ == "__main__":
    start()
