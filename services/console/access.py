"""Access of browsers to the gateway: an API key per browser, in memory only, and a client per key.

The cookie has a random id of the browser. A restart signs everybody out.
"""

from collections import OrderedDict
from functools import lru_cache, partial

from freshet_client import AsyncClient, FreshetError, PermissionDenied, Tls
from nicegui import app, ui

from services.console.config import ConsoleSettings

# The context of calls that return items. Results of experiments do not count these exposures.
LOOK = {"surface": "console"}
MAX_BROWSERS, MAX_CLIENTS, TIMEOUT_S = 10_000, 64, 5.0


class Access:
    def __init__(self, settings: ConsoleSettings) -> None:
        self.settings, self._keys = settings, OrderedDict[str, str]()
        tls = settings.tls
        own = None if tls is None else Tls(ca=tls.ca, certificate=tls.certificate, key=tls.key)
        make = partial(AsyncClient, settings.gateway, tls=own, timeout_s=TIMEOUT_S)
        # A client that is dropped ends once its calls have ended. The next call with its key makes a new one.
        self.client_of = lru_cache(MAX_CLIENTS)(lambda key: make(api_key=key or None))

    @property
    def key(self) -> str:
        """This browser's key, "" if it is not signed in."""
        return self._keys.get(app.storage.browser["id"], "")

    async def admit(self, key: str) -> frozenset[str] | None:
        """Return a key's roles, None if unknown. key: "" for none. Raises: FreshetError for an unusable key."""
        try:
            found = await self.client_of(key).catalogue(max_categories=1)
        except PermissionDenied:
            return None
        if not key and not self.settings.is_for_this_machine:
            raise FreshetError("This gateway asks for no keys: the console shows it on the loopback address alone.")
        return frozenset(found.roles)

    def sign_in(self, key: str) -> None:
        self._keys[app.storage.browser["id"]] = key
        while len(self._keys) > MAX_BROWSERS:
            self._keys.popitem(last=False)

    def sign_out(self) -> None:
        """Forget this browser's key, and show the page to sign in."""
        self._keys.pop(app.storage.browser["id"], None)
        ui.navigate.to("/sign-in")
