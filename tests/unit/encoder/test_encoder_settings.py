"""The encoder's bounds fit the others': what it keeps, a search must be able to leave out. Its key is a secret."""

from pathlib import Path

import pytest

from services.contracts.pseudonyms import DEVELOPMENT_PSEUDONYM_KEY, pseudonym_key
from services.encoder.bootstrap import pseudonym_keys
from services.encoder.config import EncoderSettings
from services.platform.config import ConfigError, load_settings


def test_outside_loopback_the_public_key_of_development_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pseudonym_key(load_settings(EncoderSettings)) == DEVELOPMENT_PSEUDONYM_KEY.encode()
    monkeypatch.setenv("FRESHET_HOST", "0.0.0.0")
    said = r"FRESHET_PSEUDONYM_KEY='freshet-development', which is public, allowed with FRESHET_HOST='0\.0\.0\.0': a"
    with pytest.raises(ConfigError, match=said):
        pseudonym_key(load_settings(EncoderSettings))
    monkeypatch.setenv("FRESHET_PSEUDONYM_KEY", "my own")
    assert pseudonym_key(load_settings(EncoderSettings)) == b"my own"


def test_the_key_is_read_from_its_file_where_the_variable_is_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("in the file\n")
    monkeypatch.setenv("FRESHET_HOST", "0.0.0.0")
    monkeypatch.setenv("FRESHET_PSEUDONYM_KEY_FILE", str(tmp_path / "key"))
    monkeypatch.setenv("FRESHET_PSEUDONYM_KEYS_BEFORE", f"{DEVELOPMENT_PSEUDONYM_KEY} in-the-file")
    settings = load_settings(EncoderSettings)
    assert pseudonym_key(settings) == b"in the file"
    assert pseudonym_keys(settings)[1:] == [DEVELOPMENT_PSEUDONYM_KEY.encode(), b"in-the-file"]
    monkeypatch.setenv("FRESHET_PSEUDONYM_KEY", "in-the-file")
    settings = load_settings(EncoderSettings)
    assert pseudonym_key(settings) == b"in-the-file"
    # A user has each pseudonym once.
    assert pseudonym_keys(settings)[1:] == [DEVELOPMENT_PSEUDONYM_KEY.encode()]


@pytest.mark.parametrize("content", [None, b"", b"\n", b"x" * 65, b"\xff"])
def test_a_file_without_a_key_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("FRESHET_PSEUDONYM_KEY_FILE", str(file))
    with pytest.raises(
        ConfigError, match=rf"FRESHET_PSEUDONYM_KEY_FILE='{file}' allowed: a file of 1-64 bytes"
    ) as caught:
        pseudonym_key(load_settings(EncoderSettings))
    assert "xxx" not in str(caught.value)


def test_a_key_that_is_refused_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"FRESHET_PSEUDONYM_KEY": "x" * 65, "FRESHET_PSEUDONYM_KEYS_BEFORE": "y " * 3}.items():
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(ConfigError) as caught:
                load_settings(EncoderSettings)
        assert str(caught.value).startswith(f"{variable}='***' allowed: ")
