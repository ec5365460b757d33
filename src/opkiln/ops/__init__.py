"""The catalogue, one folder for each op. A hit reads ``op.py``, which imports no torch."""
