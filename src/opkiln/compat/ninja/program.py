"""What the shim and the preloaded library start: ``program.py front ARGUMENTS…`` or
``program.py serve SOCKET``."""

import os
import sys


def main() -> None:
    """Does what the first argument says."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.append(os.path.dirname(package))
    if sys.argv[1] == "serve":
        from opkiln.compat.ninja import server

        server.serve(int(sys.argv[2]))
    else:
        from opkiln.compat.ninja import front

        sys.exit(front.start(sys.argv[2:]))


if __name__ == "__main__":
    main()
