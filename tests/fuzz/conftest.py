"""Puts this folder and the scenes of the unit tests on the import path."""

import paths  # noqa: F401
