"""`--backend torch`: graphs are split into segments that torch's compiler (AOTInductor) compiles
ahead of time; backends/cpu and backends/cuda add device-specific kernels."""

from .backend import BACKEND

__all__ = ["BACKEND"]
