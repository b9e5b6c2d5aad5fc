"""``python -m tritium``: the command line."""

import sys

from tritium.cli import main

sys.exit(main())
