"""`python -m loadtest SCENARIO`: enable greenlets before all other imports; `knee` and `path` use a compiled sender."""

import signal
import sys

if __name__ == "__main__":
    # If a supervisor ends a run, it still restores what it changed, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.argv[1:2] in (["knee"], ["path"]):
        from . import knee, path

        sys.exit({"knee": knee, "path": path}[sys.argv[1]].main(sys.argv[2:]))
    from .engine import enable_gevent

    enable_gevent()
    from .command import main

    sys.exit(main())
