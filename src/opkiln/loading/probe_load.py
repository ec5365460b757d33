"""Load a library in this process and end: what the load test's child runs.

Started as ``python -I -S probe_load.py LIBRARY...`` with torch's libraries first. It imports
neither torch nor opkiln: dlopening ``libtorch_cpu`` takes a fifth of the time of importing torch.
A crash here is a crash that no user process will see.
"""

import ctypes
import os
import sys


def main() -> int:
    for path in sys.argv[1:]:
        try:
            ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        except OSError as error:
            print(error)
            return 1
    # Past here lie only static destructors, in an order that torch's own exit never uses.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
