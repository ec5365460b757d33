"""Makes the compile steps for sources and the link step for objects. One file per compiler."""
