"""The command line: one file per command; the only place where arguments and their environment variables are read."""
