"""Freshet's own processes, with docker-compose.yml's command and settings; the data folder replaces volumes."""

import os
import secrets
import sys
from pathlib import Path

from services.gateway.edge.api_keys import write_private
from services.platform.config import environment_tls
from services.platform.rpc.health_check import probe_grpc
from services.stack.children import Launch
from services.stack.components.component import Component, Place, inherited_environment
from services.stack.compose import local_environment
from services.stack.errors import StackError
from services.stack.folders import REPOSITORY
from services.stack.version import freshet_version

TLS_VARIABLES = ("FRESHET_TLS_CERT", "FRESHET_TLS_KEY", "FRESHET_TLS_CA")
# Only the gateway uses these files.
KEY_FILES = ("FRESHET_API_KEYS", "FRESHET_AUDIT_LOG")
SIGNING_KEY_VARIABLE = "FRESHET_GATEWAY_SIGNING_KEY"
CHECKPOINTS_VARIABLE = "FRESHET_REFRESHER_CHECKPOINTS"


class Process(Component):
    """One of Freshet's processes."""

    def launch(self, place: Place) -> Launch:
        program, *arguments = self.service.command
        if program != "python":
            raise StackError(self.name, f"its command in docker-compose.yml is {program!r}; expected python")
        settings = local_environment(self.service, place.ports, place.bundle, place.text)
        if CHECKPOINTS_VARIABLE in settings:
            settings[CHECKPOINTS_VARIABLE] = str(place.state.data(self.name))
        # Paths are relative to the caller; the process has another working folder.
        tls = environment_tls()
        if tls is not None:
            for variable, file in zip(TLS_VARIABLES, (tls.certificate, tls.key, tls.ca), strict=True):
                settings[variable] = str(file.absolute())
        if self.name == "gateway":
            settings |= {name: str(Path(value).absolute()) for name in KEY_FILES if (value := os.environ.get(name))}
            if not settings.get(SIGNING_KEY_VARIABLE):
                settings[f"{SIGNING_KEY_VARIABLE}_FILE"] = str(_signing_key(place))
        return Launch(
            argv=[sys.executable, *arguments],
            environment=inherited_environment() | settings | dict(place.settings),
            cwd=REPOSITORY,
        )

    def probe(self, place: Place) -> str | None:
        return probe_grpc(place.ports.address(self.name), tls=environment_tls())

    def version(self, place: Place) -> str:
        return f"freshet {freshet_version()}"


def _signing_key(place: Place) -> Path:
    """Return the stack's own key, made once, so that clients' tokens stay valid."""
    file = place.state.data("gateway") / "signing-key"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, secrets.token_urlsafe(32))
    return file.absolute()
