"""The command line, one file per command. Data goes to standard output, messages to error."""
