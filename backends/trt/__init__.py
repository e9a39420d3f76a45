"""TensorRT: the graph written straight into an `INetworkDefinition`."""

from .backend import BACKEND

__all__ = ["BACKEND"]
