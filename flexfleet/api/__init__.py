"""Define the Python API that `import flexfleet` provides. Each file covers one topic."""
