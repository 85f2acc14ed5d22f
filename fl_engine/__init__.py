"""The engine of flexfleet: sub-models, rounds, and what an algorithm is. See `core/types/` first."""

import os

__version__ = "0.1.0"
PARAMETER_TABLE = "https://github.com/flexfleet/flexfleet/blob/main/params.yaml"

# MKL reads this at its first call. Without it, on a CPU without AVX-512 the bits of a matrix product depend on where in
# memory the matrices lie, and so on who trains beside a client.
os.environ.setdefault("MKL_CBWR", "AUTO")
# cuBLAS likewise. Without it, its bits may differ from one time to the next.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
