"""The torch backend: ahead-of-time Inductor packages, one per distinct segment of the graph."""

from .backend import BACKEND

__all__ = ["BACKEND"]
