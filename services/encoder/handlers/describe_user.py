"""Describe what is stored of a user, for the preview and the report of a forget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.contracts.pseudonyms import PSEUDONYMS_BETWEEN
from services.encoder.domain import Vocabulary
from services.encoder.ports import UserReader
from services.platform.validation import validate_id
from services.user_state.forgetting import pseudonyms_of
from services.user_state.values import UserKeys


@dataclass(frozen=True, slots=True)
class UserDescription:
    """What is stored of a user. pseudonym: under every known key, joined with `PSEUDONYMS_BETWEEN`. in_model: training
    gave the user a component. forgotten_up_to: partition -> last erased offset.
    """

    pseudonym: str
    stored: UserKeys
    in_model: bool
    forgotten_up_to: Mapping[int, int]


@dataclass(kw_only=True, eq=False)
class DescribeUser:
    """The handler, for an event loop. pseudonym_keys: the current one, then the earlier ones."""

    reader: UserReader
    vocabulary: Vocabulary
    pseudonym_keys: Sequence[bytes]
    applied_up_to: Callable[[str], Mapping[int, int]]

    async def __call__(self, user_id: str) -> UserDescription:
        """Describe a user. Raises: InvalidRequest; DependencyUnavailable if the state store does not answer."""
        validate_id("user_id", user_id)
        # Read before the store, so that the data found reflects the reported forget.
        forgotten = self.applied_up_to(user_id)
        return UserDescription(
            pseudonym=PSEUDONYMS_BETWEEN.join(pseudonyms_of(user_id, self.pseudonym_keys)),
            stored=await self.reader.read_keys(user_id),
            in_model=user_id in self.vocabulary.user_index,
            forgotten_up_to=forgotten,
        )
