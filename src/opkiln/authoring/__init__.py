"""``@opkiln.op``: an op declared by one Python function."""
