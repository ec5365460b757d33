"""The command line, one file per theme. Data goes to standard output, messages to error."""
