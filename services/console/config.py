"""The console's settings: the shared ones, its port, and the address of the gateway."""

import shlex
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from services.contracts.processes import HTTP_STEP
from services.platform.config import ProcessSettings
from services.platform.transport import check_address


class ConsoleSettings(ProcessSettings):
    """A field's alias is its environment variable."""

    asks_client_certificates: ClassVar[bool] = False

    port: int = Field(default=50060, ge=0, le=65535, validation_alias="FRESHET_CONSOLE_PORT")
    gateway: str = Field(default="127.0.0.1:50050", validation_alias="FRESHET_CONSOLE_GATEWAY")

    # Host names of the console that browsers may use, separated by commas. "" means the loopback address.
    hosts: str = Field(default="", validation_alias="FRESHET_CONSOLE_HOSTS")

    # The local stack's state folder. Commands on pages name it, and `freshet results --publish` writes below it.
    state: Path | None = Field(default=None, validation_alias="FRESHET_STATE")

    @field_validator("gateway")
    @classmethod
    def _gateway(cls, value: str) -> str:
        return check_address(value)

    @property
    def names(self) -> list[str]:
        """The names in `hosts`."""
        return [name.strip().lower() for name in self.hosts.split(",") if name.strip()]

    def command(self, words: str) -> str:
        """A command of `freshet` to copy, for this stack."""
        return f"freshet {words}" + (f" --state {shlex.quote(str(self.state))}" if self.state else "")

    @property
    def is_for_this_machine(self) -> bool:
        """Whether only this machine reaches the console, directly and without a proxy."""
        return self.is_on_loopback and not self.names

    @property
    def gateway_http(self) -> str:
        """The gateway's address for JSON over HTTP, for the examples on pages."""
        host, _, port = self.gateway.rpartition(":")
        return f"{'https' if self.tls else 'http'}://{host}:{int(port) + HTTP_STEP}"
