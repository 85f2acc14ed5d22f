"""How orders reach clients. Each backend gives the same bits for the same plan."""

from fl_engine.backends.in_process import InProcess

BACKENDS = {"in_process": InProcess}

__all__ = ["BACKENDS", "InProcess"]
