"""`python -m g4ir.cli`."""

import sys

from g4ir.cli import main

sys.exit(main())
