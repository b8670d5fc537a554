"""`python -m tests.simulation`, behind `make sim`."""

import sys

from .many import main

if __name__ == "__main__":
    sys.exit(main())
