"""The contract on TensorRT, tests/trt/fake.py in its place."""

from tests.contract.directory import *  # noqa: F403
from tests.contract.generation import *  # noqa: F403
from tests.contract.session import *  # noqa: F403

FLOW = "trt"
