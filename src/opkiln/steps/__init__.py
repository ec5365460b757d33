"""How a source becomes a compile step and objects become a link step; one file per compiler."""
