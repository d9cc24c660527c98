"""What the files in `formats/` hold, and how to make them anew: every format that has a version, of today.

    PYTHONPATH=.:tests:stubs .venv/bin/python tests/golden/formats.py        # needs redis-server, as the local stack

They are the base of 0.1.0: `test_formats.py` and `tests/contract/test_stored_keys.py` read them with the code that
is there and compare them with the objects here. Make them anew only with a change of a format, whose number goes up;
then say in the commit what becomes of what the old format wrote. All numbers are written down, so no seed and no
person stands behind them.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from fakes.encoder import MemoryForgetLog, MemoryStream
from fakes.refresher import MemoryLog, to_bytes

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.bundles.model_manifest import AbsenceShape, EncoderShape, HeadShape, NeighbourShape
from services.algorithms.generation.generator import Generator
from services.algorithms.generation.phrases_part import PhraseParts
from services.algorithms.indexes.mutable.snapshot import Snapshot
from services.algorithms.item_table.ids import ItemIds
from services.algorithms.items.catalogue import catalogue_from_bundle
from services.algorithms.items.live_catalogue import LiveCatalogue
from services.algorithms.rules.filters import ItemFilter
from services.algorithms.rules.ranking_rules import Rule
from services.algorithms.scoring.neighbours import ItemNeighbours
from services.algorithms.scoring.packed_state import pack_query_state
from services.algorithms.scoring.states import ItemStates, PairGate, QueryStates
from services.candidates.bootstrap import host_build
from services.cli.backup import make_backup
from services.contracts import stored_history
from services.contracts.operations import Operation
from services.contracts.stored_history import RecentId, StoredEvent
from services.contracts.topics.attributions import ATTRIBUTIONS, Attribution, ForgetUpTo, Undo, encode_attribution
from services.contracts.topics.dead_letters import dead_letter
from services.contracts.topics.experiments import EXPERIMENTS, Arm, Experiment, Experiments
from services.contracts.topics.experiments import encode_operation as encode_experiments
from services.contracts.topics.exposures import EXPOSURES, Exposure, encode_exposure
from services.contracts.topics.forgets import FORGETS, Forget, encode_forget
from services.contracts.topics.histories import (
    HISTORIES,
    MARK_KEY,
    HistoryRecord,
    Mark,
    encode_history,
    encode_mark,
)
from services.contracts.topics.index_deltas import (
    INDEX_DELTAS,
    IndexDelta,
    ItemDelta,
    MemoryDelta,
    encode,
    item_key,
    memory_key,
)
from services.contracts.topics.interactions import INTERACTIONS, Interaction, encode_interaction
from services.contracts.topics.items import ITEMS, CatalogueItem, encode_item
from services.contracts.topics.refresher_checkpoints import REFRESHER_CHECKPOINTS, Head, Piece, encode_head
from services.contracts.topics.rules import RULES, StandingRules
from services.contracts.topics.rules import encode_operation as encode_rules
from services.contracts.topics.search_clicks import SEARCH_CLICKS, SearchClick, encode_click, key_of
from services.contracts.topics.version_sets import VERSION_SETS, Share, VersionSet, VersionSets, encode_operation
from services.contracts.wire import PackedQueryState
from services.offline.archive.writing import ArchiveInteractions
from services.offline.bundles.model import BundleContent, write_bundle
from services.offline.bundles.text import TextBundleWriter, save_phrases
from services.offline.training import checkpoint
from services.offline.training.phrases.vocabulary_fit import build_vocabulary
from services.platform.redis_clients import open_client
from services.platform.stream.records import DeadLetter, Position, SourceRecord, pack_position
from services.refresher.domain import records
from services.refresher.domain.partition import Partition
from services.refresher.domain.rules import ModelItems, Rules
from services.refresher.handlers.fold import FoldRecords
from services.refresher.ports import StoredCheckpoint
from services.user_state import layout as state_layout
from services.user_state.values import AdvanceStep, PopularityStep, StoredState, UserUpdate
from services.user_state.writer import StateWriter

HERE = Path(__file__).parent / "formats"

Floats = npt.NDArray[np.float32]

NOW_MS = 1_750_000_000_000
EPOCH = "0123456789abcdef-8"
USER, OTHER_USER = "ann", "größer"


def numbers(*shape: int, step: int = 7) -> Floats:
    """Exact multiples of 1/8 between -5/8 and 5/8."""
    flat = np.arange(int(np.prod(shape)), dtype=np.int64) * step % 11 - 5
    return (flat / 8).astype(np.float32).reshape(shape)


def unit(*shape: int) -> Floats:
    """Rows of length 1 along one axis each, which half precision holds."""
    *rows, width = shape
    flat = np.zeros((int(np.prod(rows)), width), np.float32)
    at = np.arange(len(flat))
    flat[at, at % width] = 1 - 2 * (at // width % 2)
    return flat.reshape(shape)


# -- the bundle: 5 items, P_q = P_x = 2, d = 4, a mixture with every optional part ------------------------------------

ENCODER = EncoderShape(
    kind="hstu",
    num_blocks=1,
    num_heads=1,
    width=8,
    d_qk=4,
    d_v=4,
    max_history=8,
    num_time_buckets=16,
    uses_user_index=True,
    norm_epsilon=1e-6,
    output_norm="layer",
    actions=("like", "rating -1"),
)
HEAD = HeadShape(
    kind="mol", num_query_components=2, num_item_components=2, component_width=4, tau=0.05, gate_hidden=3,
    query_activation="gelu",
)  # fmt: skip
ABSENCE = AbsenceShape(floor_seconds=2048, num_buckets=3)
PAIR_GATE = PairGate(
    hidden_weight=numbers(3, 4), hidden_bias=numbers(3), out_weight=numbers(4, 3), out_bias=numbers(4, step=3)
)
NEIGHBOURS = ItemNeighbours(
    shape=NeighbourShape(num_neighbours=2, decay=0.75, model_share=0.5),
    items=np.array([[1, 2], [0, 2], [4, 0], [0, 1], [3, 0]], np.int32),
    weights=np.array([[0.5, 0.25], [1, 0], [0, 0], [2, 1], [1, 1]], np.float32),
)
EVENTS_YAML = b"types:\n  like: {role: positive}\n  rating: {role: positive, weight: 0.25, centre: 3}\n"
BUNDLE = BundleContent(
    encoder=ENCODER,
    head=HEAD,
    weights={
        "embedding.weight": numbers(5, 8),
        "absence_components": np.concatenate([np.zeros((1, 2, 4), np.float32), numbers(2, 2, 4)]),
        "absence_gate": np.concatenate([np.zeros((1, 4), np.float32), numbers(2, 4)]),
    },
    item_states=ItemStates(components=unit(5, 2, 4), gate=numbers(5, 4)),
    pair_gate=PAIR_GATE,
    item_ids=["film-0", "film-1", "film-2", "film-3", "größer"],
    titles=["Film № 0", "Film № 1", "", "Film № 3", "Größer"],
    categories=[("Drama", "War"), (), ("War",), ("Drama",), ()],
    counts=np.array([3, 1, 4, 1, 0]),
    user_ids=[USER, OTHER_USER],
    data={"name": "formats"},
    metrics={"hr@10": 0.5},
    new_item_length=0.75,
    neighbours=NEIGHBOURS,
    absence=ABSENCE,
    attributes=pa.table(
        {
            "price": pa.array([1.5, None, 0.25, 4.0, 2.0], pa.float64()),
            "language": pa.array(["fr", "de", None, "fr", "de"], pa.string()),
        }
    ),
)

# -- the text bundle ---------------------------------------------------------------------------------------------------

TEXTS = ["new saga", "galaxy film", "saga"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "new", "saga", "galaxy", "film"]
TEXT_HEAD = replace(HEAD, query_activation="silu")
TEXT_STATES = ItemStates(components=unit(3, 2, 4))
TEXT_ENCODER, PHRASE_ENCODER = b"a graph of texts", b"a graph of phrases"
POSITIONS, WIDTH = 12, 4


def write_text(folder: Path, scratch: Path) -> None:
    for name, graph in (("text.onnx", TEXT_ENCODER), ("phrases.onnx", PHRASE_ENCODER)):
        (scratch / name).write_bytes(graph)
    vocabulary = build_vocabulary(TEXTS, size=310, min_count=1)
    generator = Generator.build(
        numbers(len(vocabulary), WIDTH),
        numbers(1, WIDTH, step=3),
        np.arange(len(vocabulary), dtype=np.int32)[None],
        vocabulary.encode_all(TEXTS),
        TEXTS,
        [[row] for row in range(len(TEXTS))],
        max_tokens=POSITIONS,
    )
    with TextBundleWriter(folder, item_ids=BUNDLE.item_ids[:3], texts=TEXTS, words=WORDS) as to:
        to.add_text_mol(scratch / "text.onnx", TEXT_STATES, PAIR_GATE, head=TEXT_HEAD, max_tokens=16)
        to.add_phrases(
            save_phrases(scratch / "phrases", PhraseParts(generator, vocabulary), scratch / "phrases.onnx"),
            vocabulary=vocabulary.fingerprint,
            vocabulary_size=len(vocabulary),
            positions=POSITIONS,
            width=WIDTH,
            max_tokens=16,
        )
        to.seal(data={"name": "formats"})


# -- topics ------------------------------------------------------------------------------------------------------------


def packed(model_version: str = "model-1") -> PackedQueryState:
    components, gate = pack_query_state(QueryStates(components=unit(1, 2, 4), gate=numbers(1, 4)))
    return PackedQueryState(
        model_version=model_version, components=components, gate=gate, num_components=2, component_width=4
    )


_OF = {
    "event_id": "event-1",
    "item_id": "film-1",
    "event_time_ms": NOW_MS,
    "recorded_ms": NOW_MS + 250,
    "partition": 1,
    "offset": 41,
    "user_pseudonym": "0123456789abcdef0123456789abcdef",
}
CLICKED = Interaction(
    user_id=USER,
    item_id="film-1",
    event_id="event-1",
    type="search_click",
    value=2.5,
    event_time_ms=NOW_MS,
    context={"page": "home"},
    query="new saga",
    exposure_id="exposure-1",
)
UNDONE = Interaction(user_id=USER, event_id="undo-1", undoes_event_id="event-1", event_time_ms=NOW_MS + 1)
# As another system writes it.
OUTSIDE = Interaction(
    user_id=USER, item_id="film-2", event_id="event-2", type="rating", value=4.5, event_time_ms=NOW_MS
)
OUTSIDE_JSON = (
    b'{"user_id": "ann", "item_id": "film-2", "event_id": "event-2", "type": "rating", "value": 4.5, '
    b'"event_time": 1750000000}'
)
JSON_HEADERS = [("content-type", b"application/json")]
ATTRIBUTED = Attribution(**_OF, state=packed(), type="rating", value=4.5)
TAKEN_BACK = Undo(**(_OF | {"event_id": "undo-1", "offset": 42}), undoes=Position(1, 41))
VOIDED = ForgetUpTo(
    forget_id="forget-1", up_to={0: -1, 1: 41}, user_pseudonym=_OF["user_pseudonym"], recorded_ms=NOW_MS + 250
)
CLICK = SearchClick(**_OF, query="new saga", value=2.5)
SHOWN = Exposure(
    exposure_id="exposure-1",
    shown_ms=NOW_MS,
    surface="recommend",
    model_version="model-1",
    index_version="model-1+7.0a",
    text_version="text-1",
    first_position=11,
    item_ids=["film-1", "film-2"],
    scores=[0.75, 0.5],
    sources=["mol", "new"],
    propensities=[1.0, 0.25],
    context={"page": "home"},
    absence_bucket=2,
    assignments=(("closer", "two", 0.5), ("words", "", 1.0)),
    teams=(0, 1),
)
FORGET = Forget(forget_id="forget-1", user_id=OTHER_USER, up_to={0: 7, 1: -1}, requested_ms=NOW_MS)
PUT = CatalogueItem(
    item_id="film-9",
    title="Film № 9",
    categories=("Drama", "War"),
    attributes={"price": 1.5, "language": "fr"},
    available=False,
)
# As the bundle declares them.
KINDS = {"price": "number", "language": "tag"}
WITHDRAWN = CatalogueItem(item_id="film-9", withdrawn=True)
EVENTS = [
    StoredEvent(NOW_MS - 2_000, 1, 40, 2**64 - 1, "film-0", "rating", 4.5, "exposure-1"),
    StoredEvent(NOW_MS - 1_000, 1, 41, 7, "größer", "like", 0.0, ""),
]
RECENT = [RecentId(2**64 - 1, 1, 40, 1, "film-0"), RecentId(7, 1, 41, 0, "")]
SEEN = {"film-0": NOW_MS - 2_000, "größer": NOW_MS - 1_000}
HISTORY = HistoryRecord(
    reading=2**63, positions={1: 41}, forgotten={1: 3}, events=EVENTS, recent=RECENT, seen=SEEN
)  # fmt: skip
MARK = Mark(
    reading=2**63, covered=41, num_partitions=8, anchors="0:aa,40:bb,41:cc", counts={"applied": 41, "duplicates": 1}
)
DELTA = IndexDelta(
    model_version="model-1",
    partition=1,
    offset=41,
    batch=3,
    last_of_batch=False,
    newest_recorded_ms=NOW_MS,
    change=ItemDelta(
        item_id="film-9", components=unit(2, 4), gate=numbers(4), model_share=0.25, num_interactions=12
    ),
)  # fmt: skip
REMEMBERED = replace(
    DELTA,
    last_of_batch=True,
    change=MemoryDelta(
        entry_id="1:41", item_id="film-9", components=unit(2, 4), weight=-0.5, type="rating", event_time_ms=NOW_MS
    ),
)
DROPPED = replace(DELTA, change=ItemDelta(item_id="film-9", dropped=True))
CHECKPOINT_HEAD = Head(
    owner="0123456789abcdef",
    next_piece=9,
    values={"format": 2, "folded_offset": 41},
    parts={"rest": (Piece("0123456789abcdef/8", 17, 5, "ab"),), "rows/0": ()},
)
OPERATION = Operation(
    after=VersionSets(
        revision=2,
        sets={
            name: VersionSet(
                name=name,
                model_version=f"model-{name}",
                bundle=f"/bundles/{name}",
                candidates="127.0.0.1:50052",
                reranker="127.0.0.1:50053",
                refreshers=("127.0.0.1:50054", "127.0.0.1:50064"),
                generator="",
            )
            for name in ("one", "two")
        },
        serving="one",
        before="",
        canary=Share(name="two", share=0.125),
        shadow=None,
        salt="salt",
    ),
    operation="canary",
    operator="op@host",
    operation_id="operation-1",
    time_ms=NOW_MS,
)
BOOSTED = Rule(name="new", which=ItemFilter(exclude_seen=False, allow_categories=("drama",)), boost=0.5)
RULES_OPERATION = Operation(
    after=StandingRules(revision=1, rules=(BOOSTED,)),
    operation="put 1 rules",
    operator="ann@here",
    operation_id="0123456789abcdef",
    time_ms=NOW_MS,
)
EXPERIMENT_OPERATION = Operation(
    after=Experiments(revision=1)
    .created(
        Experiment(
            name="closer",
            layer="ranking",
            share=0.25,
            arms=(
                Arm(name="control", share=0.5),
                Arm(
                    name="two",
                    share=0.5,
                    version_set="two",
                    rules=(
                        Rule(name="new", which=ItemFilter(exclude_seen=False, allow_categories=("drama",)), boost=0.5),
                    ),
                    diversity=0.25,
                    max_per_category=2,
                    new_item_share=0.125,
                ),
            ),
            context={"surface": "home"},
            salt="salt",
        )
    )
    .started("closer", NOW_MS),
    operation="start closer",
    operator="op@host",
    operation_id="operation-2",
    time_ms=NOW_MS,
)
GAP_OPERATION = Operation(
    after=EXPERIMENT_OPERATION.after.created(
        Experiment(
            name="faster",
            arms=(Arm(name="control", share=0.5), Arm(name="estimated", share=0.5, max_gap=0.125)),
            salt="salt",
        )
    ),
    operation="create faster",
    operator="op@host",
    operation_id="operation-3",
    time_ms=NOW_MS,
)
LETTER = DeadLetter(
    SourceRecord(INTERACTIONS, 1, 43, NOW_MS, USER.encode(), b"\xff", [("trace", b"t")]),
    "value=1 unreadable bytes allowed: an Interaction message",
)


def topic_records() -> dict[str, list[tuple[bytes, bytes, Sequence[tuple[str, bytes]]]]]:
    """Key, value and headers of each record, by topic."""
    letter = dead_letter(LETTER)
    history = stored_history.pack_history(HISTORY.positions, HISTORY.forgotten, EVENTS, RECENT, SEEN)
    key = USER.encode()
    return {
        INTERACTIONS: [
            (key, encode_interaction(CLICKED), []),
            (key, encode_interaction(UNDONE), []),
            (key, OUTSIDE_JSON, JSON_HEADERS),
        ],
        ATTRIBUTIONS: [(b"film-1", encode_attribution(one), []) for one in (ATTRIBUTED, TAKEN_BACK, VOIDED)],
        SEARCH_CLICKS: [(key_of(one), encode_click(one), []) for one in (CLICK, TAKEN_BACK, VOIDED)],
        EXPOSURES: [(b"exposure-1", encode_exposure(SHOWN), [])],
        FORGETS: [(FORGET.user_id.encode(), encode_forget(FORGET), [])],
        ITEMS: [(b"film-9", encode_item(one), []) for one in (PUT, WITHDRAWN)],
        HISTORIES: [
            (key, encode_history(USER, history, HISTORY.reading), []),
            (MARK_KEY, encode_mark(MARK), []),
        ],
        INDEX_DELTAS: [
            (item_key("model-1", "film-9"), encode(DELTA), []),
            (memory_key("model-1", "1:41"), encode(REMEMBERED), []),
            (item_key("model-1", "film-9"), encode(DROPPED), []),
        ],
        REFRESHER_CHECKPOINTS: [(b"model-1/1/0123456789abcdef/head-0", encode_head(CHECKPOINT_HEAD), [])],
        VERSION_SETS: [(b"", encode_operation(OPERATION), [])],
        EXPERIMENTS: [(b"", encode_experiments(one), []) for one in (EXPERIMENT_OPERATION, GAP_OPERATION)],
        RULES: [(b"", encode_rules(RULES_OPERATION), [])],
        letter.topic: [(letter.key, letter.value or b"", list(letter.headers))],
    }


# -- the state store ---------------------------------------------------------------------------------------------------

HOME = state_layout.home_of(USER, EPOCH)
STATE = StoredState(
    query_state=packed(),
    partition=1,
    offset=41,
    event_time_ms=NOW_MS - 1_000,
    applied_ms=NOW_MS,
    traceparent=f"00-{5:032x}-{6:016x}-01",
)
UPDATE = UserUpdate(
    user_id=USER,
    model_version="model-1",
    expected=b"",
    positions={HOME.partition: 41, 1: 41},
    forgotten={1: 3},
    events=EVENTS,
    recent=RECENT,
    seen_times=SEEN,
    turned_down=["film-0"],
    state=STATE,
    state_change="set",
)
STEP = AdvanceStep(
    partition=HOME.partition,
    from_watermark=-1,
    to_watermark=41,
    counts={"applied": 41, "duplicates": 1},
    anchors="0:aa,40:bb,41:cc",
    popular=PopularityStep(half_life_s=3600.0, joins={"film-0": 2.0, "größer": 1.0}),
)
FORGETS_READER = "freshet-encoder"


def write_store(url: str) -> dict[str, Any]:
    """Apply a user and a step to an empty store; every key by its type, without its time to live."""
    with open_client(url, timeout_s=5) as client:
        client.flushall()
        client.set(state_layout.EPOCH_KEY, EPOCH)
        writer = StateWriter(url)
        writer.add_model("model-1")
        writer.begin([STEP.partition], EPOCH)
        writer.apply([UPDATE], EPOCH, {})
        writer.advance([STEP], EPOCH)
        writer.note_forgets(writer.forgets_applied(FORGETS_READER, EPOCH).of([HOME.partition]), 5, EPOCH)
        writer.close()
        read: dict[bytes, Any] = {
            b"string": lambda key: client.get(key).hex(),
            b"hash": lambda key: {name.hex(): value.hex() for name, value in sorted(client.hgetall(key).items())},
            b"zset": lambda key: {name.hex(): score for name, score in client.zrange(key, 0, -1, withscores=True)},
            b"set": lambda key: sorted(name.hex() for name in client.smembers(key)),
        }
        found: dict[str, Any] = {}
        for key in sorted(client.scan_iter("*")):
            kind = client.type(key)
            found[key.decode()] = {"type": kind.decode(), "content": read[kind](key)}
        return found


def put_store(url: str, keys: Mapping[str, Any]) -> None:
    """The inverse: these keys into an empty store. The user's entry in the table ends in 2100."""
    with open_client(url, timeout_s=5) as client:
        client.flushall()
        for key, one in keys.items():
            content = one["content"]
            match one["type"]:
                case "string":
                    client.set(key, bytes.fromhex(content))
                case "hash":
                    client.hset(
                        key, mapping={bytes.fromhex(name): bytes.fromhex(value) for name, value in content.items()}
                    )
                case "zset":
                    client.zadd(key, {bytes.fromhex(name): score for name, score in content.items()})
                case "set":
                    client.sadd(key, *(bytes.fromhex(name) for name in content))


# -- the refresher's checkpoint ----------------------------------------------------------------------------------------


def rules() -> Rules:
    return Rules(
        items=ModelItems(
            model_version="model-1",
            num_query_components=2,
            states=BUNDLE.item_states,
            index=ItemIds.of(BUNDLE.item_ids),
            pair_gate=PAIR_GATE,
        ),
        feedback=default_schema().feedback,
        max_remembered=4,
        max_pending=4,
    )


def taken(offset: int, item_id: str, user: str) -> records.Interaction:
    return records.Interaction(
        offset=offset,
        source_position=pack_position(1, 10 + offset),
        item_id=item_id,
        user=user,
        query=packed(),
        type="rating",
        value=4.0,
        moment_ms=NOW_MS + 1_000 * offset,
        recorded_ms=NOW_MS + 1_000 * offset,
    )


# film-9 is unknown: its interaction is pending.
FOLDED: Sequence[records.Entry] = (
    taken(0, "film-0", "a"),
    taken(1, "film-1", "b"),
    taken(2, "film-9", "a"),
    records.Undo(3, pack_position(1, 11), "film-1", "b"),
    records.Forgetting(4, "c", {1: 9}),
    taken(5, "film-2", "c"),
)


def write_checkpoint() -> bytes:
    log = MemoryLog()
    for entry in FOLDED:
        log.append(0, entry)
    state = Partition(0, rules(), {})
    FoldRecords(log).fold(state, log.entries[0])
    return to_bytes(state)


# -- the catalogue's snapshot ------------------------------------------------------------------------------------------

CHANGED = ItemDelta(
    item_id="film-1", components=unit(4, 4)[2:], gate=numbers(4, step=3), model_share=0.25, num_interactions=12
)
NEW = replace(CHANGED, item_id="film-9", model_share=0.0)
WRITTEN_S = NOW_MS // 1000


def live_catalogue(bundle: Path, snapshot: Snapshot | None = None) -> LiveCatalogue:
    from services.algorithms.bundles.model_bundle import load_bundle

    return LiveCatalogue(catalogue_from_bundle(load_bundle(bundle)), build=host_build([]), snapshot=snapshot)


def changed_catalogue(bundle: Path) -> LiveCatalogue:
    live = live_catalogue(bundle)
    live.apply(4, [CHANGED, NEW], mark="0a", newest_recorded_ms=NOW_MS)
    live.describe([CatalogueItem(item_id="film-2", withdrawn=True)])
    return live


# -- training and archive ----------------------------------------------------------------------------------------------

IDENTITY = {"config": {"epochs": 3, "encoder": {"kind": "hstu"}}, "data": "0123456789abcdef"}
PROGRESS = checkpoint.Progress(epoch=1, next_batch=2, positions=156, loss_sum=1.5, part_seconds={"data": 0.25})
GENERATORS = {"torch": torch.arange(4, dtype=torch.uint8)}
BEST = {"weight": torch.tensor([[0.5, -0.25]])}


def trained() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    """A model of two weights after one step."""
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.25, 0.5]]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.tensor([[1.0, 2.0]])).sum().backward()
    optimizer.step()
    return model, optimizer


def interactions_log() -> MemoryStream:
    stream = MemoryStream(1)
    for key, value, headers in topic_records()[INTERACTIONS]:
        stream.append(0, key, value, NOW_MS + 250, list(headers))
    return stream


# ----------------------------------------------------------------------------------------------------------------------


def plain(key: bytes, value: bytes, headers: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    return {"key": key.hex(), "value": value.hex(), "headers": [[name, text.hex()] for name, text in headers]}


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Write all of them."""
    from services.stack import Ports, Stack

    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "events.yaml").write_bytes(EVENTS_YAML)
        bundle = write_bundle(scratch / "bundle", replace(BUNDLE, events_yaml=EVENTS_YAML))
        data = write_checkpoint()
        (scratch / "partition-0.checkpoint").write_bytes(data)

        def kept(number: int) -> list[StoredCheckpoint]:
            from services.refresher.adapters.checkpoint_topic import CheckpointFiles

            return list(CheckpointFiles(scratch).load(number))

        make_backup(
            HERE / "backup",
            bundle=bundle.path,
            checkpoints=kept,
            partitions=[0],
            interactions={HOME.partition: 41},
            epoch=EPOCH,
        )
        write_text(HERE / "text", scratch)
        changed_catalogue(bundle.path).capture(written_s=WRITTEN_S)(HERE / "snapshots")
        model, optimizer = trained()
        checkpoint.save(HERE / "training", IDENTITY, PROGRESS, model, optimizer, GENERATORS, BEST)
        ArchiveInteractions(HERE / "archive", log=interactions_log().reader(), forgets=MemoryForgetLog().reader()).run()
        (HERE / "archive" / ".lock").unlink(missing_ok=True)
        stack = Stack(scratch / "stack", ports=Ports.free())
        stack.up(["redis"])
        try:
            keys = write_store(stack.redis_url)
        finally:
            stack.down()
    # When the keys end is the clock's.
    table = keys[state_layout.users_key(HOME.partition)]["content"]
    table[USER.encode().hex()] = state_layout.pack_entry(41, 4_102_444_800).encode().hex()
    write_json(HERE / "store.json", keys)
    write_json(HERE / "topics.json", {name: [plain(*one) for one in found] for name, found in topic_records().items()})


if __name__ == "__main__":
    main()
