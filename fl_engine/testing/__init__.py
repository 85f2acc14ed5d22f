"""Conformance suites: what every algorithm, backend, model and data set must hold to, also one of your own."""
