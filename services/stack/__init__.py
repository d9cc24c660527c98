"""The local stack: Kafka, Redis, the inference server and Freshet's processes, without containers."""

from services.stack.errors import StackError
from services.stack.launcher import PartStatus, Stack
from services.stack.ports import Ports

__all__ = ["PartStatus", "Ports", "Stack", "StackError"]
