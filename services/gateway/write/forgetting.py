"""A user's data, and the effect of a forget: ForgetUser's answer. Plain values, no Protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredUser:
    """The data of the encoder process and the state store. forgotten_up_to: by partition of `interactions`, the offset
    up to which the user is forgotten; empty: no forget. in_model: training gave the user a component.
    """

    pseudonym: str
    history_events: int = 0
    seen_items: int = 0
    query_states: int = 0
    in_model: bool = False
    forgotten_up_to: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributions:
    """One refresher's data of a user. partitions: the partitions of `attributions` that it reads."""

    summed_interactions: int = 0
    remembered_interactions: int = 0
    forgotten_up_to: Mapping[int, int]
    partitions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetReport:
    """found, left: counts by kind of data, before and after; a kind that could not be counted is left out. is_applied:
    every process has applied the forget. remains: sentences that say what remains, and until when.
    """

    forget_id: str
    found: Mapping[str, int]
    left: Mapping[str, int]
    is_applied: bool
    remains: Sequence[str]
