"""The engine of flexfleet: sub-models, rounds, and what an algorithm is. See `types.py` first."""

__version__ = "0.1.0"
