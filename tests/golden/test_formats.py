"""What 0.1.0 stores is read by the code that is there, and says what it said; another format's number is refused.

`formats.py` made the files and holds what they say. The keys of the state store are read in
`tests/contract/test_stored_keys.py`, which has a Redis.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.phrases import text_of
from fakes.refresher import from_bytes, to_bytes
from golden import formats
from golden.formats import HERE

from services.algorithms.bundles.event_schema import EventSchema
from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.bundles.text_bundle import load_text_bundle
from services.algorithms.generation.phrases_part import load_phrases
from services.algorithms.indexes.mutable.snapshot import load_snapshot
from services.cli.backup import MANIFEST, Positions, _own_checksum, read_backup
from services.contracts import stored_history
from services.contracts.topics import experiments, histories, index_deltas, rules
from services.contracts.topics.dead_letters import stored_letters
from services.contracts.topics.exposures import decode_exposure
from services.contracts.topics.forgets import decode_forget
from services.contracts.topics.interactions import decode_interaction
from services.contracts.topics.items import decode_item
from services.contracts.topics.refresher_checkpoints import decode_head
from services.contracts.topics.search_clicks import decode_click
from services.contracts.topics.version_sets import decode_operation
from services.offline.archive.files import open_whole
from services.offline.bundles.text import save_phrases
from services.offline.training import checkpoint
from services.platform.errors import PreconditionFailed
from services.platform.stream.records import DeadLetter, SourceRecord
from services.refresher.adapters.topics import QueryShape, decode_attribution
from services.refresher.checkpoint import from_file
from services.refresher.domain.records import Forgetting, Interaction, Undo
from services.user_state import layout as state_layout

BACKUP = HERE / "backup"
CHECKPOINT = BACKUP / "checkpoints" / "partition-0.checkpoint"
(SNAPSHOT,) = (HERE / "snapshots").iterdir()


def assert_arrays(found: Any, wanted: Any, *names: str) -> None:
    for name in names:
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_bundle() -> None:
    bundle, wanted = load_bundle(BACKUP / "bundle"), formats.BUNDLE
    assert bundle.model_version == json.loads((BACKUP / "bundle" / MANIFEST).read_text())["model_version"]
    assert (bundle.encoder, bundle.manifest.head) == (wanted.encoder, wanted.head)
    assert (bundle.manifest.data, bundle.manifest.metrics) == (wanted.data, wanted.metrics)
    assert (bundle.manifest.new_item_length, bundle.manifest.absence) == (0.75, formats.ABSENCE)
    assert (bundle.item_ids, bundle.titles) == (wanted.item_ids, wanted.titles)
    assert bundle.categories == [tuple(names) for names in wanted.categories]
    assert bundle.counts.tolist() == wanted.counts.tolist()
    assert bundle.user_index == {user_id: row for row, user_id in enumerate(wanted.user_ids)}
    assert bundle.event_schema == EventSchema.parse(formats.EVENTS_YAML, "events.yaml")
    assert wanted.attributes is not None
    rows = [{name: value for name, value in row.items() if value is not None} for row in wanted.attributes.to_pylist()]
    assert [bundle.attributes.of_row(row) for row in range(len(rows))] == rows
    assert bundle.weights().keys() == wanted.weights.keys()
    for name, array in wanted.weights.items():
        np.testing.assert_array_equal(bundle.weights()[name], array)
    assert bundle.pair_gate is not None
    assert bundle.neighbours is not None
    assert bundle.absence is not None
    assert bundle.neighbours.shape == formats.NEIGHBOURS.shape
    assert_arrays(bundle.item_states, wanted.item_states, "components", "gate")
    assert_arrays(bundle.pair_gate, formats.PAIR_GATE, "hidden_weight", "hidden_bias", "out_weight", "out_bias")
    assert_arrays(bundle.neighbours, formats.NEIGHBOURS, "items", "weights")
    np.testing.assert_array_equal(bundle.absence.components, wanted.weights["absence_components"])


def test_a_backup() -> None:
    found = read_backup(BACKUP)
    assert found.positions == Positions(
        attributions={0: 5}, interactions={formats.HOME.partition: 41}, epoch=formats.EPOCH
    )


def test_a_refreshers_checkpoint() -> None:
    data = CHECKPOINT.read_bytes()
    state = from_bytes(data, 0, formats.rules(), {})
    assert from_file(to_bytes(state)) == from_file(data)
    assert state.folded_offset == 5
    # film-1 was undone, film-2 comes from behind what was forgotten.
    assert {item: state.ledger.of_item(state.numbers.of[item])["users"].shape[0] for item in state.sums} == {
        "film-0": 1,
        "film-2": 1,
    }
    assert state.ledger.forgotten_up_to("c") == {1: 9}
    pending, _ = state.pending.to_arrays()
    assert pending == ["film-9"]
    assert sorted(entry.item_id for _, entry in state.remembered.memory.held()) == ["film-0", "film-2", "film-9"]


def test_a_text_bundle(tmp_path: Path) -> None:
    bundle = load_text_bundle(HERE / "text")
    assert (bundle.item_ids, bundle.texts) == (formats.BUNDLE.item_ids[:3], formats.TEXTS)
    assert (bundle.text_mol.head, bundle.text_mol.max_tokens) == (formats.TEXT_HEAD, 16)
    assert bundle.pair_gate is not None
    assert_arrays(bundle.item_states, formats.TEXT_STATES, "components")
    assert_arrays(bundle.pair_gate, formats.PAIR_GATE, "hidden_weight", "hidden_bias", "out_weight", "out_bias")
    parts = load_phrases(bundle)
    assert [parts.generator.identifiers.text(number) for number in range(3)] == formats.TEXTS
    assert [text_of(parts.vocabulary, one) for one in parts.vocabulary.encode_all(formats.TEXTS)] == formats.TEXTS
    written = save_phrases(tmp_path / "phrases", parts, tmp_path)
    for name in written.keys() - {"encoder.onnx"}:
        assert (tmp_path / "phrases" / name).read_bytes() == (HERE / "text" / "phrases" / name).read_bytes(), name


def test_a_catalogues_snapshot() -> None:
    wanted = formats.changed_catalogue(BACKUP / "bundle")
    found = load_snapshot(SNAPSHOT, model_version=wanted.base.model_version)
    assert found.manifest.said["written_s"] == formats.WRITTEN_S
    live = formats.live_catalogue(BACKUP / "bundle", found)
    # Whatever was withdrawn is read again from `items`.
    live.describe([formats.CatalogueItem(item_id="film-2", withdrawn=True)])
    assert (live.served.name, live.served.newest_recorded_ms) == (wanted.served.name, formats.NOW_MS)
    for one in (formats.CHANGED, formats.NEW):
        explained = live.explain(one.item_id)
        assert explained is not None
        np.testing.assert_array_equal(explained.state.components[0], one.components)
        np.testing.assert_array_equal(explained.state.gate[0], one.gate)
        assert (explained.model_share, explained.num_interactions) == (one.model_share, one.num_interactions)


def test_a_training_checkpoint() -> None:
    (wanted, stepped), model = formats.trained(), torch.nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    restored = checkpoint.load(HERE / "training", formats.IDENTITY, model, optimizer)
    assert restored is not None
    progress, generators, best = restored
    assert progress == formats.PROGRESS
    torch.testing.assert_close(model.weight, wanted.weight, rtol=0, atol=1e-6)
    for name, moment in stepped.state[wanted.weight].items():
        torch.testing.assert_close(optimizer.state[model.weight][name], moment, rtol=0, atol=1e-6)
    assert torch.equal(generators["torch"], formats.GENERATORS["torch"])
    assert torch.equal(best["weight"], formats.BEST["weight"])


def test_an_archive() -> None:
    archive = open_whole(HERE / "archive")
    found = [record for some in archive.records(0) for record in some]
    assert found == formats.interactions_log().log[0]


# -- topics ------------------------------------------------------------------------------------------------------------


def records_of(topic: str) -> list[SourceRecord]:
    stored = json.loads((HERE / "topics.json").read_text())[topic]
    return [
        SourceRecord(
            topic,
            0,
            offset,
            formats.NOW_MS + 500,
            bytes.fromhex(one["key"]),
            bytes.fromhex(one["value"]),
            [(name, bytes.fromhex(text)) for name, text in one["headers"]],
        )
        for offset, one in enumerate(stored)
    ]


def decoded(topic: str, read: Callable[[SourceRecord], Any]) -> list[Any]:
    return [read(record) for record in records_of(topic)]


def test_every_topic_has_its_records() -> None:
    assert json.loads((HERE / "topics.json").read_text()).keys() == formats.topic_records().keys()


def test_interactions() -> None:
    assert decoded("interactions", lambda one: decode_interaction(one.value, one.headers, one.key)) == [
        formats.CLICKED,
        formats.UNDONE,
        formats.OUTSIDE,
    ]


def test_attributions() -> None:
    shape = QueryShape(model_version="model-1", num_components=2, component_width=4, num_pairs=4)
    wanted, position = formats.ATTRIBUTED, formats.pack_position(1, 41)
    assert decoded("attributions", lambda one: decode_attribution(one, shape)) == [
        Interaction(
            offset=0,
            source_position=position,
            item_id=wanted.item_id,
            user=wanted.user_pseudonym,
            query=wanted.state,
            type=wanted.type,
            value=wanted.value,
            moment_ms=wanted.event_time_ms,
            recorded_ms=wanted.recorded_ms,
        ),
        Undo(1, position, wanted.item_id, wanted.user_pseudonym),
        Forgetting(2, wanted.user_pseudonym, formats.VOIDED.up_to),
    ]


@pytest.mark.parametrize(
    ("topic", "read", "wanted"),
    [
        ("search-clicks", lambda one: decode_click(one.value), [formats.CLICK, formats.TAKEN_BACK, formats.VOIDED]),
        ("exposures", lambda one: decode_exposure(one.value), [formats.SHOWN]),
        ("forgets", lambda one: decode_forget(one.key, one.value), [formats.FORGET]),
        ("items", lambda one: decode_item(one.key, one.value, formats.KINDS), [formats.PUT, formats.WITHDRAWN]),
        ("refresher-checkpoints", lambda one: decode_head(one.value), [formats.CHECKPOINT_HEAD]),
        ("version-sets", lambda one: decode_operation(one.value), [formats.OPERATION]),
        (
            "experiments",
            lambda one: experiments.decode_operation(one.value),
            [formats.EXPERIMENT_OPERATION, formats.GAP_OPERATION],
        ),
        ("rules", lambda one: rules.decode_operation(one.value), [formats.RULES_OPERATION]),
    ],
)
def test_topics_whose_records_are_plain(topic: str, read: Callable[[SourceRecord], Any], wanted: list[Any]) -> None:
    assert decoded(topic, read) == wanted


def test_histories() -> None:
    user, mark = records_of("histories")
    assert histories.decode_history(user.key or b"", user.value) == formats.HISTORY
    assert (mark.key, histories.decode_mark(mark.value)) == (histories.MARK_KEY, formats.MARK)


def test_index_deltas() -> None:
    found = decoded("index-deltas", lambda one: index_deltas.decode(one.key, one.value))
    for delta, wanted in zip(found, (formats.DELTA, formats.REMEMBERED, formats.DROPPED), strict=True):
        for name in ("model_version", "partition", "offset", "batch", "last_of_batch", "newest_recorded_ms"):
            assert getattr(delta, name) == getattr(wanted, name), name
        plain = {name: getattr(wanted.change, name) for name in wanted.change.__slots__}
        for name, value in plain.items():
            np.testing.assert_array_equal(getattr(delta.change, name), value, err_msg=name)


def test_dead_letters() -> None:
    (letter,) = stored_letters(records_of("interactions.dead-letter"))
    found = DeadLetter(
        SourceRecord(letter.topic, *letter.position, letter.written_ms, letter.key, letter.value, list(letter.headers)),
        letter.reason,
    )
    assert found == formats.LETTER


# -- the state store's packed values -----------------------------------------------------------------------------------


def test_a_stored_history() -> None:
    keys = json.loads((HERE / "store.json").read_text())
    history = keys[state_layout.history_key(formats.HOME)]["content"]
    packed = {bytes.fromhex(name).decode(): bytes.fromhex(value) for name, value in history.items()}
    assert stored_history.unpack_events(packed["events"]) == formats.EVENTS
    assert stored_history.unpack_recent(packed["ids"]) == formats.RECENT
    positions = state_layout.unpack_positions(formats.EPOCH, packed["position"])
    assert positions == (formats.UPDATE.positions, formats.UPDATE.forgotten)


# -- another format ----------------------------------------------------------------------------------------------------


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _bundle(folder: Path) -> Any:
    edit(folder / "backup/bundle/manifest.json", format=5)
    return lambda: load_bundle(folder / "backup/bundle")


def _text(folder: Path) -> Any:
    edit(folder / "text/manifest.json", format=3)
    return lambda: load_text_bundle(folder / "text")


def _snapshot(folder: Path) -> Any:
    path = folder / "snapshots" / SNAPSHOT.name
    edit(path / "manifest.json", format=5)
    return lambda: load_snapshot(path, model_version="m")


def _training(folder: Path) -> Any:
    (path,) = (folder / "training").glob("*/progress.json")
    edit(path, format=2)
    model, optimizer = formats.trained()
    return lambda: checkpoint.load(folder / "training", formats.IDENTITY, model, optimizer)


def _archive(folder: Path) -> Any:
    edit(folder / "archive/archive.json", format=3)
    return lambda: open_whole(folder / "archive")


def _backup(folder: Path) -> Any:
    path = folder / "backup" / MANIFEST
    manifest: Mapping[str, Any] = {**json.loads(path.read_text()), "format": 2}
    edit(path, format=2, sha256=_own_checksum(manifest))
    return lambda: read_backup(folder / "backup")


@pytest.mark.parametrize(
    ("change", "where", "message"),
    [
        (_bundle, "backup/bundle/manifest.json", "format=5; this program reads format 4"),
        (_text, "text/manifest.json", "format=3; this program reads format 2"),
        (_snapshot, f"snapshots/{SNAPSHOT.name}/manifest.json", "format=5; this program reads format 4"),
        (_training, "training/000000000156", "format=2; this program reads format 1"),
        (_archive, "archive/archive.json", "in format 3; this version reads 'interactions' in format 2"),
        (_backup, "backup", "has format 2; this version reads 1"),
    ],
)
def test_another_format_is_refused_with_where_what_and_what_is_allowed(
    change: Callable[[Path], Callable[[], Any]], where: str, message: str, tmp_path: Path
) -> None:
    shutil.copytree(HERE, tmp_path / "formats")
    read = change(tmp_path / "formats")
    with pytest.raises((ValueError, PreconditionFailed), match=message) as refusal:
        read()
    assert str(tmp_path / "formats" / where) in str(refusal.value)
