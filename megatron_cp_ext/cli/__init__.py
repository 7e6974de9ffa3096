"""The command line program: each file parses, calls and prints, and decides nothing."""
