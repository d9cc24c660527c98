"""`freshet bench <subject>`: measure one subject, and write tables and plots."""

from services.cli.commands.bench import models, papers, retrieval
from services.cli.commands.bench.group import app

__all__ = ["app", "models", "papers", "retrieval"]
