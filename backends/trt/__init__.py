"""TensorRT backend: graphs are parsed into an `INetworkDefinition` and built into engines."""

from .backend import BACKEND

__all__ = ["BACKEND"]
