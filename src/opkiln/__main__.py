"""``python -m opkiln`` is ``opkiln``."""

from opkiln.cli.main import main

if __name__ == "__main__":
    main()
