"""The ops, one folder for each."""
