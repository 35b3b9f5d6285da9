"""`python -m infinity`: the same as the command `infinity`."""

import sys

from infinity.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
