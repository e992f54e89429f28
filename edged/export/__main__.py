"""`python -m edged.export --model MODEL --out DIR`: the command line of the exporter."""

from __future__ import annotations

import sys

from edged.export.run import main

if __name__ == "__main__":
    sys.exit(main())
