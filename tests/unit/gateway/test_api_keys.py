"""The keys file: what is written is read, secrets are not in it, and what cannot be used is refused by name."""

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.gateway.edge import api_keys
from services.gateway.edge.api_keys import create_key, digest, read_keys, remove_key
from services.gateway.edge.first_keys import make_first_keys
from services.gateway.edge.roles import Role
from services.platform.config import ConfigError

GOOD: dict[str, Any] = {"id": "shop", "sha256": "0a" * 32, "roles": ["recommend"]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys" / "api-keys.json"


def test_a_new_key_is_read_back_and_its_secret_stands_nowhere(file: Path) -> None:
    expires = datetime(2027, 1, 31, tzinfo=UTC)
    secret = create_key(file, id="shop", roles=frozenset({Role.INGEST}), expires=expires, requests_per_second=2.5)
    create_key(file, id="other", roles=frozenset(Role))
    shop, other = read_keys(file)
    assert (shop.id, shop.roles, shop.expires, shop.requests_per_second) == ("shop", {Role.INGEST}, expires, 2.5)
    assert shop.sha256 == digest(secret.encode()).hex()
    assert (other.id, other.roles, other.expires, other.requests_per_second) == ("other", set(Role), None, None)
    assert secret.removeprefix("freshet_") not in file.read_text()


def test_the_file_is_its_owners_alone_and_nothing_is_left_beside_it(file: Path) -> None:
    create_key(file, id="shop", roles=frozenset(Role))
    assert remove_key(file, "shop")
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


def test_a_link_to_the_file_stays_a_link(file: Path, tmp_path: Path) -> None:
    create_key(file, id="a", roles=frozenset(Role))
    (tmp_path / "link").symlink_to(file)
    create_key(tmp_path / "link", id="b", roles=frozenset(Role))
    assert [key.id for key in read_keys(file)] == ["a", "b"]


def test_a_write_that_fails_leaves_the_file_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_key(file, id="a", roles=frozenset(Role))
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(api_keys.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        create_key(file, id="b", roles=frozenset(Role))
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


def test_a_taken_id_is_refused_and_a_revoked_one_is_free_again(file: Path) -> None:
    first = create_key(file, id="shop", roles=frozenset(Role))
    with pytest.raises(ConfigError, match="id='shop' allowed: one that no key in"):
        create_key(file, id="shop", roles=frozenset(Role))
    assert remove_key(file, "shop")
    assert not remove_key(file, "shop")
    assert create_key(file, id="shop", roles=frozenset(Role)) != first


def test_writers_at_the_same_time_lose_none_of_their_keys(file: Path) -> None:
    def create(number: int) -> None:
        create_key(file, id=f"k{number}", roles=frozenset(Role))

    writers = [threading.Thread(target=create, args=(number,)) for number in range(12)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {key.id for key in read_keys(file)} == {f"k{number}" for number in range(12)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "a b"}, r"keys\.0\.id='a b' allowed: .*\[A-Za-z0-9\._-\]\{1,64\}"),
        ({"id": 7}, r"keys\.0\.id='7' allowed: .*string"),
        ({"roles": []}, r"keys\.0\.roles='\[\]' allowed: .*at least 1"),
        (
            {"roles": ["boss"]},
            r"keys\.0\.roles\.0='boss' allowed: .*'recommend', 'ingest', 'operator', 'eraser' or 'support'",
        ),
        ({"expires": "2027-01-31T00:00:00"}, r"keys\.0\.expires='2027-01-31T00:00:00' allowed: .*timezone"),
        ({"expires": "soon"}, r"keys\.0\.expires='soon' allowed: "),
        ({"requests_per_second": 0}, r"keys\.0\.requests_per_second='0' allowed: .*0\.001"),
        ({"requests_per_second": "5"}, r"keys\.0\.requests_per_second='5' allowed: .*number"),
        ({"burst": 0}, r"keys\.0\.burst='0' allowed: .*1"),
        ({"expire": "2027-01-31"}, r"keys\.0\.expire allowed: Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_a_field_that_is_not_allowed_is_named_with_its_value(file: Path, change: dict[str, Any], said: str) -> None:
    file.parent.mkdir()
    file.write_text(json.dumps({"keys": [GOOD | change]}))
    with pytest.raises(ConfigError, match=rf"api-keys\.json: {said}"):
        read_keys(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Invalid JSON"),
        ("{", "Invalid JSON"),
        ("[" * 10_000, "Invalid JSON"),
        ("[]", "object"),
        ("{}", r"keys allowed: Field required"),
        ('{"keys": {}}', r"keys allowed: .*array"),
        ('{"keys": [3]}', r"keys\.0 allowed: .*object"),
        ('{"keys": [{"id": "a"}]}', r"keys\.0\.sha256 allowed: Field required; keys\.0\.roles allowed: Field required"),
        (json.dumps({"keys": [GOOD, GOOD | {"sha256": "0b" * 32}]}), "each id once, and 'shop' is there twice"),
        (json.dumps({"keys": [GOOD, GOOD | {"id": "b"}]}), "each sha256 once"),
    ],
)
def test_a_file_of_another_form_is_refused(file: Path, text: str, said: str) -> None:
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"api-keys\.json: .*{said}"):
        read_keys(file)


@pytest.mark.parametrize("field", ["sha256", "secret", "id2"])
def test_a_refusal_shows_nothing_that_may_be_a_secret(file: Path, field: str) -> None:
    secret = "freshet_" + "s" * 43
    file.parent.mkdir()
    file.write_text(json.dumps({"keys": [{"id": "shop", field: secret}]}))
    with pytest.raises(ConfigError) as caught:
        read_keys(file)
    assert secret not in str(caught.value)
    # Nor may the log's traceback.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_first_keys_are_made_once_in_two_folders(tmp_path: Path) -> None:
    keys, secrets = tmp_path / "keys", tmp_path / "secrets"
    secrets.mkdir()
    make_first_keys(keys, secrets)
    (key,) = read_keys(keys / "api-keys.json")
    assert (key.roles, key.sha256) == (set(Role), digest((secrets / "api-key").read_bytes()).hex())
    before = {path: path.read_bytes() for folder in (keys, secrets) for path in folder.iterdir()}
    assert {path.name for path in before} == {"api-keys.json", "api-key", "pseudonym-key", "signing-key"}
    # The gateway is given the first folder: it writes the encoder's pseudonyms, and has no API key.
    assert (keys / "pseudonym-key").read_bytes() == (secrets / "pseudonym-key").read_bytes()
    assert not (keys / "api-key").exists()
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in before)
    make_first_keys(keys, secrets)
    assert {path: path.read_bytes() for path in before} == before
    # How a container's key is rotated; pseudonyms stay.
    (keys / "api-keys.json").unlink()
    make_first_keys(keys, secrets)
    assert (secrets / "api-key").read_bytes() != before[secrets / "api-key"]
    assert (secrets / "pseudonym-key").read_bytes() == before[secrets / "pseudonym-key"]


def test_every_secret_is_another_one_of_256_bits(file: Path) -> None:
    made = {create_key(file, id=f"k{number}", roles=frozenset(Role)) for number in range(20)}
    assert len(made) == 20
    assert all(len(secret.removeprefix("freshet_")) == 43 for secret in made)
