"""`--backend torch`. On a GPU torch's compiler (AOTInductor) compiles segments of the graphs ahead
of time, with kernels of backends/cuda; a CPU runs step programs of backends/cpu by default."""

from .backend import BACKEND

__all__ = ["BACKEND"]
