"""The contract on the interpreter."""

from tests.contract.directory import *  # noqa: F403
from tests.contract.generation import *  # noqa: F403
from tests.contract.session import *  # noqa: F403

FLOW = "reference"
