"""Architecture grammars, filters, coverage and flags."""
