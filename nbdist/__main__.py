"""The command line of nbdist: `python -m nbdist sessions`."""

import sys

from .kernel.named.terminal import main

if __name__ == "__main__":
    sys.exit(main())
