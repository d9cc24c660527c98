"""`python -m loadtest SCENARIO`: greenlets first, everything else after; `knee` has a compiled sender."""

import signal
import sys

if __name__ == "__main__":
    # Ended by a supervisor, a run still puts back what it changed, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:2] == ["knee"]:
        from . import knee

        sys.exit(knee.main(sys.argv[2:]))
    from .engine import enable_gevent

    enable_gevent()
    from .command import main

    sys.exit(main())
