"""Measure a trained nano: everything that docs/nano.md shows.

    python benchmarks/nano.py --checkpoint FOLDER [--twin FOLDER] [--out DIR] [--only NAME] [--quick]
        [--docs docs/nano.md]

Losses, block recall, recall of definitions and drafting are measured on the served path: `m31.load`, engine, pages and
kernels of the reference backend, in the arithmetic that the model was trained for. Writes results.json (every figure
with its interval), tables.md and plots into DIR, and keeps each finished measurement there: an interrupted run goes on
where it stopped. Needs matplotlib.
"""

from __future__ import annotations

import sys

from nano_figures.main import main

if __name__ == "__main__":
    sys.exit(main())
