"""The Python API: what `import flexfleet` offers. A file for each of its subjects."""
