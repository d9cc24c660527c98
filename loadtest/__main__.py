"""`python -m loadtest SCENARIO`: greenlets first, everything else after."""

import sys

from .engine import enable_gevent

if __name__ == "__main__":
    enable_gevent()
    from .command import main

    sys.exit(main())
