"""``python -m torchlift``."""

from __future__ import annotations

import sys

from torchlift.cli import main

if __name__ == "__main__":
    sys.exit(main())
