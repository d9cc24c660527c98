"""What is loaded, source by source, and how far the topics are applied."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from services.generator.domain.phrases import Phrases
from services.generator.domain.requests import GeneratorInfo, SourceInfo
from services.generator.handlers.match import Match

if TYPE_CHECKING:  # it loads PyTorch, which a process without a text bundle has no need of
    from services.generator.domain.text_mol import TextMol


class Describe:
    """Reads the sources as they are now."""

    def __init__(
        self,
        matches: Sequence[Match[Any]],
        *,
        text: "TextMol | None",
        phrases: Phrases | None,
        text_version: str,
        items: Callable[[], int],
    ) -> None:
        """`matches`: of all sources, `text` and `phrases` among them; `items`: the next offset of topic `items`."""
        self._matches, self._text, self._phrases = matches, text, phrases
        self._text_version, self._items = text_version, items

    def __call__(self) -> GeneratorInfo:
        """Everything at once."""
        text, phrases = self._text, self._phrases
        return GeneratorInfo(
            text_version=self._text_version,
            sources=[_info(match) for match in self._matches],
            vocabulary_size=0 if phrases is None else phrases.vocabulary_size,
            num_clicks=0 if text is None else text.num_clicks,
            clicks=None if text is None else text.clicks,
            items=self._items(),
        )


def _info(match: Match[Any]) -> SourceInfo:
    if match.source is None:
        return SourceInfo(source=match.name, is_loaded=False, reason=match.reason)
    return SourceInfo(
        source=match.name,
        is_loaded=True,
        num_documents=match.source.num_documents,
        num_bytes=match.source.num_bytes,
    )
