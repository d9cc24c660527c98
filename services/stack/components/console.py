"""Starts the console, a process of Freshet that serves HTTP and calls only the gateway."""

import http.client
import importlib.util
import ssl
from dataclasses import replace

from services.platform.config import environment_tls
from services.stack.children import Launch
from services.stack.components.component import Place
from services.stack.components.process import Process
from services.stack.ports import CONSOLE

_PROBE_S = 2.0


class Console(Process):
    """The console. It needs the extra `console`."""

    def missing(self) -> tuple[str, str] | None:
        if importlib.util.find_spec("nicegui") is not None:
            return None
        return "NiceGUI is not installed", "pip install 'freshet-recsys[console]', or freshet up --no-console"

    def launch(self, place: Place) -> Launch:
        made = super().launch(place)
        own = {"FRESHET_CONSOLE_PORT": str(place.ports[CONSOLE]), "FRESHET_STATE": str(place.state.root)}
        return replace(made, environment=dict(made.environment) | own)

    def probe(self, place: Place) -> str | None:
        tls, port = environment_tls(), place.ports[CONSOLE]
        made: http.client.HTTPConnection
        if tls is None:
            made = http.client.HTTPConnection("127.0.0.1", port, timeout=_PROBE_S)
        else:
            context = tls.client_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            made = http.client.HTTPSConnection("127.0.0.1", port, timeout=_PROBE_S, context=context)
        try:
            made.request("GET", "/healthz")
            status = made.getresponse().status
        except (OSError, http.client.HTTPException) as exc:
            return f"no answer ({exc})"
        finally:
            made.close()
        return None if status == 200 else f"answers {status}"
