"""The systems side by side. A peer has ``bring()`` (its imports), ``load()`` and ``check()``.

The modules are imported in the child processes alone; nothing here imports a peer at its top.
"""
