"""The tests of clients of `g4ir serve`, over vLLM's server (see differences.py)."""

from tests.serve.test_client import *  # noqa: F403
