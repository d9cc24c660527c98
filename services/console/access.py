"""Access of browsers to the gateway: an API key per browser, in memory only, and a client per key.

The cookie has a random id of the browser. A restart signs everybody out.
"""

from collections import OrderedDict

from freshet_client import AsyncClient, FreshetError, PermissionDenied, Tls, Unauthenticated
from nicegui import app

from services.console.config import ConsoleSettings

SIGN_IN, UNKNOWN_KEY = "Sign in with an API key.", "The gateway does not know this key."
# The context of calls that return items. Results of experiments do not count these exposures.
LOOK = {"surface": "console"}
MAX_BROWSERS, MAX_CLIENTS, TIMEOUT_S = 10_000, 64, 5.0


class Access:
    def __init__(self, settings: ConsoleSettings) -> None:
        self.settings = settings
        tls = settings.tls
        self._tls = None if tls is None else Tls(ca=tls.ca, certificate=tls.certificate, key=tls.key)
        self._keys, self._clients = OrderedDict[str, str](), OrderedDict[str, AsyncClient]()

    @property
    def is_signed_in(self) -> bool:
        return bool(self._key)

    @property
    def client(self) -> AsyncClient:
        return self._client_of(self._key)

    async def admit(self, key: str | None = None) -> tuple[str, frozenset[str] | None]:
        """Return why the gateway cannot be called with a key, "" if it can be, and the key's roles, None if unknown.

        key: "" for a call without one; None for this browser's.
        """
        key = self._key if key is None else key
        try:
            found = await self._client_of(key).catalogue(max_categories=1)
        except Unauthenticated:
            return UNKNOWN_KEY if key else SIGN_IN, None
        except PermissionDenied:
            return "", None
        except FreshetError as error:
            return str(error), None
        if not key and not self.settings.is_for_this_machine:
            return "This gateway asks for no keys: the console shows it on the loopback address alone.", None
        return "", frozenset(found.roles)

    def sign_in(self, key: str) -> None:
        self._keys[app.storage.browser["id"]] = key
        while len(self._keys) > MAX_BROWSERS:
            self._keys.popitem(last=False)

    def sign_out(self) -> None:
        self._keys.pop(app.storage.browser["id"], None)

    @property
    def _key(self) -> str:
        return self._keys.get(app.storage.browser["id"], "")

    def _client_of(self, key: str) -> AsyncClient:
        found = self._clients.get(key)
        if found is None:
            found = AsyncClient(self.settings.gateway, api_key=key or None, tls=self._tls, timeout_s=TIMEOUT_S)
            self._clients[key] = found
            if len(self._clients) > MAX_CLIENTS:
                # The client is dropped once its calls have ended. The next call with its key makes a new one.
                self._clients.popitem(last=False)
        self._clients.move_to_end(key)
        return found
