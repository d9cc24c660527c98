"""An attribute that is computed on first use, without a lock.

Python 3.11's `functools.cached_property` locks the class attribute while any instance computes it (3.12 does not). A
merge that measures a large segment would block every search that needs the same attribute of a small segment. Here,
racing threads compute and store equal values.
"""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

Value = TypeVar("Value")


class lazy_property(Generic[Value]):
    """Decorates a method without arguments; the instance's dictionary stores its value."""

    def __init__(self, make: Callable[[Any], Value]) -> None:
        self._make = make
        self._name = make.__name__
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: object | None, owner: type) -> Self | Value:
        if instance is None:
            return self
        value = self._make(instance)
        # The class has no __set__, so this entry has precedence.
        instance.__dict__[self._name] = value
        return value
