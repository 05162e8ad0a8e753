"""The command line: each command parses, calls the library, and renders."""
