"""What each command of the console does: it reads its arguments, calls the package, and prints a table or JSON."""
