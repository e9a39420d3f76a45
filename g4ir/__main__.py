"""`python -m g4ir`, and `torchrun -m g4ir` for several ranks."""

import sys

from g4ir.cli import main

sys.exit(main())
