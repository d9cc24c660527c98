"""The installed distribution's version."""

from importlib.metadata import version

DISTRIBUTION = "freshet-recsys"


def freshet_version() -> str:
    """Return the version of pyproject.toml at installation."""
    return version(DISTRIBUTION)
