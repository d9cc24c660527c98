"""Start and end a process."""

import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog
import uvloop

from services.platform.config import ConfigError, ProcessSettings, load_settings
from services.platform.errors import FreshetError
from services.platform.logging import configure_logging
from services.platform.ports import PortTaken
from services.platform.request_context import OFF, Tracing

S = TypeVar("S", bound=ProcessSettings)

log = structlog.get_logger()

# Threads yield the interpreter this often, so a request waits at most this long.
_SWITCH_INTERVAL_S = 0.0005


def run_process(process: str, kind: type[S], run: Callable[[S], Coroutine[Any, Any, None]]) -> int:
    """Run until a signal; return the exit status.

    An invalid setting, a taken port, an unusable bundle or an unavailable dependency gives status 1, with one line on
    stderr. Other exceptions propagate.
    """
    try:
        settings = load_settings(kind)
    except ConfigError as exc:
        return _refuse(process, exc)
    configure_logging(process, settings.log_level)
    log.info("settings", **settings.describe())
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        uvloop.run(run(settings))
    except (PortTaken, FreshetError, ValueError, FileNotFoundError) as exc:
        log.error("start_refused", reason=str(exc), exc_info=exc)
        return _refuse(process, exc)
    except MemoryError as exc:
        log.error("out_of_memory", exc_info=exc)
        return _refuse(process, MemoryError(f"not enough memory for the bundle at {settings.bundle}: {exc}"))
    return 0


def configure_tracing(process: str, endpoint: str) -> Tracing:
    """Export spans to `endpoint` (OTLP over gRPC, host:port); "" is off."""
    if not endpoint:
        return OFF
    from services.platform.exported_spans import ExportedSpans, otlp_exporter

    return ExportedSpans(process, otlp_exporter(endpoint))


def _refuse(process: str, exc: Exception) -> int:
    sys.stderr.write(f"freshet {process}: {exc}\n")
    return 1
