"""The RPCs of generator.proto: messages become dataclasses and answers become messages."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from freshet.v1 import common_pb2, generator_pb2, generator_pb2_grpc

from services.algorithms.rules.attributes import Kinds
from services.contracts.wire import filter_of
from services.generator.domain.requests import MAX_K, Asked, Scored
from services.generator.domain.sources import Sources
from services.generator.handlers.match import Match, SourceAnswer, match_all
from services.platform import request_context
from services.platform.errors import FreshetError, InvalidRequest
from services.platform.validation import validate_query

SERVICE = "freshet.v1.GeneratorService"


@dataclass(frozen=True, kw_only=True)
class GeneratorServicer(generator_pb2_grpc.GeneratorServiceServicer):
    """GeneratorService over one handler per source, by name."""

    matches: Mapping[str, Match]
    text_version: str
    info: Callable[[], generator_pb2.GetGeneratorInfoResponse]
    kinds: Kinds = field(default_factory=dict)

    async def close(self) -> None:
        for match in self.matches.values():
            await match.close()

    async def FindByWords(
        self, request: generator_pb2.FindByWordsRequest, context: Any
    ) -> generator_pb2.FindByWordsResponse:
        names = list(dict.fromkeys(request.sources)) or list(self.matches)
        for name in names:
            if name not in self.matches:
                raise InvalidRequest.of("sources", name, ", ".join(self.matches))
        answers = await match_all(
            [self.matches[name] for name in names], self._asked(request), within_s=request_context.remaining_seconds()
        )
        return generator_pb2.FindByWordsResponse(
            answers=[_source_answer(one) for one in answers],
            text_version=self.text_version if any(isinstance(one.answer, Scored) for one in answers) else "",
        )

    async def GetGeneratorInfo(
        self, request: generator_pb2.GetGeneratorInfoRequest, context: Any
    ) -> generator_pb2.GetGeneratorInfoResponse:
        return await asyncio.to_thread(self.info)

    def _asked(self, request: Any) -> Asked:
        asked = Asked(query=request.query, k=request.k, filter=filter_of(request.filter))
        try:
            asked.filter.check(self.kinds)
        except ValueError as exc:
            raise InvalidRequest(f"filter: {exc}") from exc
        validate_query("query", asked.query)
        if not 1 <= asked.k <= MAX_K:
            raise InvalidRequest.of("k", asked.k, f"1-{MAX_K}")
        return asked


def info_message(sources: Sources, next_item: int) -> generator_pb2.GetGeneratorInfoResponse:
    """Return which sources are loaded, and the next offsets. next_item: the next offset of topic `items`."""
    text, phrases = sources.text, sources.phrases
    return generator_pb2.GetGeneratorInfoResponse(
        text_version=sources.text_version,
        sources=[
            generator_pb2.TextSourceInfo(source=name, reason=sources.reasons.get(name, ""))
            if one is None
            else generator_pb2.TextSourceInfo(
                source=name, is_loaded=True, num_documents=one.num_documents, num_bytes=one.num_bytes
            )
            for name, one in sources.by_name.items()
        ],
        vocabulary_size=0 if phrases is None else phrases.vocabulary_size,
        num_remembered_clicks=0 if text is None else text.num_clicks,
        clicks=[] if text is None else [common_pb2.StreamPosition(partition=0, offset=text.clicks)],
        items_offset=next_item,
    )


def _source_answer(one: SourceAnswer) -> generator_pb2.SourceAnswer:
    found = one.answer
    if isinstance(found, FreshetError):
        return generator_pb2.SourceAnswer(
            source=one.source, status=found.status.value[0], reason=found.message, milliseconds=one.milliseconds
        )
    identifiers = found.identifiers or [""] * len(found.item_ids)
    return generator_pb2.SourceAnswer(
        source=one.source,
        items=[
            generator_pb2.FoundByWords(item_id=item_id, score=score, identifier=identifier)
            for item_id, score, identifier in zip(found.item_ids, found.scores, identifiers, strict=True)
        ],
        milliseconds=one.milliseconds,
    )
