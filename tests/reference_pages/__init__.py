"""Writes docs/reference from the code: names and docstrings, commands, errors.

    PYTHONPATH=tests python -m reference_pages

Source files are parsed, not imported, so the pages are the same with every torch and Python.
"""
