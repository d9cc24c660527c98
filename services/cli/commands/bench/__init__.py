"""`freshet bench <subject>`: measure one subject, and write tables and plots.

A command gathers options and shows progress; what is measured, and how, is in services/offline/evaluation. Each module
adds its commands to the group.
"""

from services.cli.commands.bench import models, papers, retrieval
from services.cli.commands.bench.group import app

__all__ = ["app", "models", "papers", "retrieval"]
