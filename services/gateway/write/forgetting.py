"""A user's data, and the effect of a forget: ForgetUser's answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUser:
    """The data of encoder and state store. forgotten_up_to: by partition of `interactions`, empty without a forget.
    in_model: training gave the user a component.
    """

    pseudonym: str
    history_events: int = 0
    seen_items: int = 0
    query_states: int = 0
    in_model: bool = False
    forgotten_up_to: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """A refresher's data of a user. partitions: its ones of `attributions`."""

    summed_interactions: int = 0
    remembered_interactions: int = 0
    forgotten_up_to: Mapping[int, int]
    partitions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport:
    """found, left: counts by kind of data, before and after; unknown ones are left out. is_applied: by every process.
    remains: sentences that say what remains, and until when.
    """

    forget_id: str
    found: Mapping[str, int]
    left: Mapping[str, int]
    is_applied: bool
    remains: Sequence[str]
