"""`python -m services.gateway.edge.first_keys KEYS SECRETS`: create the keys that containers need.

The gateway's folder KEYS gets api-keys.json (one key with all roles), signing-key, and a copy of pseudonym-key. The
folder SECRETS gets pseudonym-key, and the secret of that one key as api-key.
"""

import secrets
import sys
from pathlib import Path

from services.gateway.edge.api_keys import create_key, write_private
from services.gateway.edge.roles import Role


def make_first_keys(keys: Path, secret: Path) -> None:
    """Create missing keys. A lost pseudonym key cannot be restored."""
    keys.mkdir(exist_ok=True)
    if not (pseudonyms := secret / "pseudonym-key").exists():
        write_private(pseudonyms, secrets.token_urlsafe(32))
    if not (copy := keys / "pseudonym-key").exists():
        write_private(copy, pseudonyms.read_text().strip())
    if not (signing := keys / "signing-key").exists():
        write_private(signing, secrets.token_urlsafe(32))
    if not (file := keys / "api-keys.json").exists():
        write_private(secret / "api-key", create_key(file, id="first", roles=frozenset(Role)))


if __name__ == "__main__":
    make_first_keys(Path(sys.argv[1]), Path(sys.argv[2]))
