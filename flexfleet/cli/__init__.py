"""Console commands. Each command parses its arguments, calls the package, and prints a table or JSON."""
