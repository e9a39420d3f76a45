"""`--backend torch`: graphs in segments, compiled ahead of time by torch's compiler, and run; what
each device adds has a room of its own."""

from .backend import BACKEND

__all__ = ["BACKEND"]
