"""`python -m loadtest SCENARIO`: greenlets first, everything else after."""

import signal
import sys

from .engine import enable_gevent

if __name__ == "__main__":
    enable_gevent()
    from .command import main

    # Ended by a supervisor, a run still puts back what it changed, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
