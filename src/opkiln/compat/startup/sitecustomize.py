"""Python runs this at startup under ``opkiln run``, which puts this directory on PYTHONPATH.

It runs in every Python that the command starts, also in one of another environment. If that
environment has no opkiln, it uses this one. A Python that is too old for opkiln runs without it.
"""

import sys


def _start() -> None:
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec, spec_from_file_location

    here = os.path.dirname(os.path.abspath(__file__))
    package = os.path.dirname(os.path.dirname(here))
    # Run the sitecustomize that this one hides.
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = module_from_spec(spec)
        spec.loader.exec_module(module)
    if sys.version_info < (3, 11):  # noqa: UP036 (any Python may be started)
        sys.stderr.write("opkiln: this Python is older than 3.11; it runs without opkiln\n")
        return
    if PathFinder.find_spec("opkiln") is None:
        # sys.path stays as it is: an entry would make every package next to opkiln importable.
        init = os.path.join(package, "__init__.py")
        spec = spec_from_file_location("opkiln", init, submodule_search_locations=[package])
        assert spec is not None  # a path that ends in .py has a loader
        assert spec.loader is not None
        module = sys.modules["opkiln"] = module_from_spec(spec)
        spec.loader.exec_module(module)
    from opkiln.compat import hook

    hook.start()


_start()
