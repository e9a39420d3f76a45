"""`python -m g4ir`, as torchrun starts it."""

import sys

from g4ir.cli import main

sys.exit(main())
