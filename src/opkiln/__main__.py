"""The ``opkiln`` command, which is also ``python -m opkiln``."""

import sys


def main() -> None:
    """Runs the command line and exits with its code."""
    if sys.argv[1:2] == ["run"]:
        from opkiln.cli import run

        run.start_now(sys.argv[1:])
    if sys.argv[1:2] == ["ninja"] and sys.argv[2:3] not in (["--help"], ["-h"]):
        from opkiln.compat.ninja import front

        sys.exit(front.start(sys.argv[2:]))
    from opkiln.cli import main as commands

    commands.main()


if __name__ == "__main__":
    main()
