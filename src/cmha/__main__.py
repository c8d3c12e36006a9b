"""python -m cmha: the same program as `cmha`."""

import sys

from cmha.cli import main

if __name__ == "__main__":
    sys.exit(main())
