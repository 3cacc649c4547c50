"""``python -m streamlap``."""

import sys

from streamlap.cli import main

if __name__ == "__main__":
    sys.exit(main())
