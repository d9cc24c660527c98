"""Freshet's version: that of the installed distribution, whose name differs from the import roots."""

from importlib.metadata import version

DISTRIBUTION = "freshet-recsys"


def freshet_version() -> str:
    """Return the version of pyproject.toml at installation."""
    return version(DISTRIBUTION)
