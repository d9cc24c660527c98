"""The local stack: Kafka, Redis, the inference server and Freshet's processes on this machine, without containers.

`Stack` (launcher.py) is what the commands, the demo and the tests use; the rest is how it does it.
"""

from services.stack.errors import StackError
from services.stack.launcher import PartStatus, Stack
from services.stack.ports import Ports

__all__ = ["PartStatus", "Ports", "Stack", "StackError"]
