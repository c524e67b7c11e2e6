"""`python -m m31`: the command line without the installed script."""

from __future__ import annotations

import sys

from m31.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
