"""The engine of flexfleet: sub-models, rounds, and what an algorithm is. See `core/types.py` first."""

import os

__version__ = "0.1.0"
PARAMETER_TABLE = "https://github.com/flexfleet/flexfleet/blob/main/params.yaml"

# MKL reads this variable at its first call. On a CPU without AVX-512, the rounding of a matrix product would otherwise
# depend on the memory addresses of the matrices, and therefore on the other clients in the process.
os.environ.setdefault("MKL_CBWR", "AUTO")
# Without this variable, cuBLAS may round differently in each run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
