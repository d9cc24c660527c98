"""The whole job: a bundle that loads, an encoder that answers as PyTorch does, a report that says what happened."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from training_scene import CONFIG, WITH_USERS, cyclic_interactions

from services.algorithms.bundles.event_schema import default_schema
from services.algorithms.bundles.model_bundle import load_bundle
from services.algorithms.encoding.actions import STRIDE
from services.offline.datasets import Interactions
from services.offline.training import PRESETS, TrainConfig, preset, train
from services.offline.training.bundling import load_model, save_bundle
from services.offline.training.choice import candidates
from services.offline.training.codebooks.inverted_file import catalogue_codebooks
from services.offline.training.export import export_bundle, max_difference
from services.offline.training.fit import fit_split
from services.offline.training.onnx_graphs import ExportError, session
from services.offline.training.presets import default_epochs, with_dot_head, with_sasrec
from services.offline.training.run import run_training
from services.refresher.bootstrap import fold_rules
from services.refresher.config import RefresherSettings

VARIANTS = {
    "hstu + mol": CONFIG,
    "with user component": WITH_USERS,
    "sasrec + mol": with_sasrec(CONFIG),
    "hstu + dot": with_dot_head(CONFIG),
    "with actions": replace(CONFIG, encoder=replace(CONFIG.encoder, actions=("click", "hide"))),
}
# One graph instead of two, half the time of an export: for what is the same whatever the encoder.
ONE_GRAPH = VARIANTS["sasrec + mol"]


def bundle_of(config: TrainConfig, path: Path) -> Path:
    data = typed(cyclic_interactions(), "click", "click", "hide", "like")
    if config.encoder.actions:
        data, _ = data.with_actions(default_schema(), config.encoder.actions)
    report = train(replace(config, epochs=1), data)
    save_bundle(path, report, cyclic_interactions(), data={}, metrics={})
    return path


def test_run_training_writes_a_bundle_and_says_how_it_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "quick", CONFIG)
    shown = io.StringIO()
    out = tmp_path / "bundle"
    report = run_training(
        out=out,
        interactions=cyclic_interactions(),
        epochs=2,
        split="time",
        head="mol",
        console=Console(file=shown, width=120),
    )
    assert json.loads(json.dumps(report)) == report
    bundle = load_bundle(out)
    learned = catalogue_codebooks(bundle.item_states, bundle.pair_gate)
    assert bundle.codebooks is not None
    assert learned is not None
    assert bundle.codebooks.text == learned.text
    bundle = load_bundle(out)
    assert bundle.model_version == report["model_version"]
    assert bundle.manifest.metrics == report["metrics"]
    assert bundle.manifest.data["split"] == "time"
    assert bundle.counts.sum() == bundle.manifest.data["events"] < len(cyclic_interactions())
    assert bundle.file("inference_server/encoder/1/model.onnx").is_file()
    assert bundle.file("inference_server/encoder/config.pbtxt").is_file()
    assert 0 < bundle.manifest.new_item_length == report["new_item_length"] <= 1
    assert report["export"]["max_error"] < 1e-4
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]  # no checkpoints left
    for words in (
        "positions/s",
        "data",
        "encoder",
        "mol",
        "optimizer",
        "peak memory",
        "popularity",
        "item_knn",
        "hr@10",
    ):
        assert words in shown.getvalue()


def test_a_resumed_training_has_the_head_and_the_epochs_that_were_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "quick", CONFIG)
    data, chosen = cyclic_interactions(), replace(candidates(CONFIG)["dot"], epochs=5)
    out = tmp_path / "bundle"
    train(
        chosen,
        fit_split(data, "leave-one-out", default_schema()).train,
        out=tmp_path / "bundle.checkpoint",
        stop_after_batches=1,
    )
    report = run_training(out=out, interactions=data, epochs=3, resume=True, export=False)
    assert (report["head"], report["epochs"], report["choice"]) == ("dot", 5, None)
    assert load_bundle(out).manifest.data["training"]["config"] == json.loads(json.dumps(chosen.as_dict()))


def rows_read(config: TrainConfig, rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Items with their actions, and padding."""
    items, actions = rng.integers(-1, 30, size), rng.integers(0, 1 + len(config.encoder.actions), size)
    return np.where(items < 0, items, items + actions * STRIDE)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_exported_encoder_equals_pytorch_at_any_batch_length_and_positions(name: str, tmp_path: Path) -> None:
    config = VARIANTS[name]
    path = bundle_of(config, tmp_path / "bundle")
    exported = export_bundle(path, interactions=cyclic_interactions())
    assert exported.max_error < 1e-5
    assert exported.histories_checked > 30
    model, onnx_file = load_model(load_bundle(path)), path / "encoder.onnx"
    rng = np.random.default_rng(0)
    for batch, length, wanted in ((1, 1, 1), (2, 5, 3), (7, 15, 1)):
        inputs = {
            "item_index": rows_read(config, rng, (batch, length)),
            "event_time": np.sort(rng.integers(9 * 10**8, 10**9, (batch, length)), axis=1),
            "position": rng.integers(0, length, (batch, wanted)),
        }
        if config.encoder.uses_user_index:
            inputs["user_index"] = rng.integers(-1, 40, batch)
        assert max_difference(model, onnx_file, inputs) < 1e-5
    names = [found.name for found in session(onnx_file).get_inputs()]
    assert names == list(inputs)
    outputs = [found.name for found in session(onnx_file).get_outputs()]
    assert outputs == ["components", *(["gate"] if config.head.is_mixture else [])]


def test_an_export_that_answers_differently_is_never_put_into_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundle_of(ONE_GRAPH, tmp_path / "bundle")
    monkeypatch.setattr("services.offline.training.onnx_graphs.TOLERANCE", -1.0)
    with pytest.raises(ExportError, match=r"differs from PyTorch by .*; allowed: -1"):
        export_bundle(path)
    assert "encoder.onnx" not in load_bundle(path).manifest.files


def test_a_missing_server_template_is_named(tmp_path: Path) -> None:
    path = bundle_of(ONE_GRAPH, tmp_path / "bundle")
    with pytest.raises(ExportError, match="holds no files; it is the inference server's model folder template"):
        export_bundle(path, template=tmp_path / "nowhere")


def test_a_bundles_model_gives_the_states_that_the_bundle_holds(tmp_path: Path) -> None:
    bundle = load_bundle(bundle_of(WITH_USERS, tmp_path / "bundle"))
    states = load_model(bundle).all_item_states()
    np.testing.assert_array_equal(states.components, bundle.item_states.components)
    assert len(bundle.user_index) == bundle.manifest.num_users == 40


def test_leave_one_out_trains_on_all_but_the_last_event_and_time_on_the_past() -> None:
    interactions = cyclic_interactions()
    one_out = fit_split(interactions, "leave-one-out", default_schema())
    assert len(one_out.train) + len(one_out.test_rows) == len(interactions)
    by_time = fit_split(interactions, "time", default_schema(), max_events=50)
    assert by_time.split_time is not None
    assert by_time.train.timestamps.max() < by_time.split_time
    assert len(by_time.test_rows) == 50
    assert interactions.timestamps[by_time.test_rows].min() >= by_time.split_time
    assert not len(fit_split(interactions, "none", default_schema()).test_rows)
    with pytest.raises(ValueError, match="split='random'; allowed: leave-one-out, time, none"):
        fit_split(interactions, "random", default_schema())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_and_takes_a_step(name: str) -> None:
    # Blocks are alike, so one stands for all; the widths are the preset's.
    config = preset(name, epochs=1)
    config = replace(config, encoder=replace(config.encoder, num_blocks=1))
    report = train(config, cyclic_interactions(events=300), stop_after_batches=1)
    assert all(torch.isfinite(weight).all() for weight in report.model.state_dict().values())


def test_small_data_gets_more_epochs_unless_somebody_says_how_many() -> None:
    config = replace(CONFIG, epochs=3, default_min_positions=1200)
    assert default_epochs(config, 800_000) == 3
    assert default_epochs(config, 200) == 6
    assert default_epochs(config, 1) == 30


def typed(data: Interactions, *names: str) -> Interactions:
    """The events with types in turn."""
    return replace(data, types=(np.arange(len(data)) % len(names)).astype(np.int16), type_names=list(names))


def test_training_learns_from_what_people_took_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "quick", replace(ONE_GRAPH, epochs=1))
    data = typed(cyclic_interactions(), "click", "dislike", "impression", "unheard of")
    shown = io.StringIO()
    run_training(
        out=tmp_path / "mixed",
        interactions=data,
        split="none",
        head="mol",
        export=False,
        console=Console(file=shown, width=120),
    )
    took = data.select(data.types == 0)
    run_training(out=tmp_path / "took", interactions=took, split="none", head="mol", export=False)
    mixed, took = load_bundle(tmp_path / "mixed"), load_bundle(tmp_path / "took")
    assert mixed.model_version == took.model_version
    assert mixed.counts.sum() == len(data) // 4
    account = "1,200 rows: 300 used, 900 left out (type dislike 300, type impression 300, type unheard of 300)"
    assert account in shown.getvalue()


def test_items_that_training_never_saw_are_new_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "quick", replace(ONE_GRAPH, epochs=1))
    data = cyclic_interactions(events=2400)
    types = np.zeros(len(data), dtype=np.int16)
    types[np.isin(data.items, [3, 4])] = 1
    data = replace(data, types=types, type_names=["click", "impression"])
    run_training(out=tmp_path / "bundle", interactions=data, split="none", head="mol", export=False)
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.untrained == {"item-3", "item-4"}
    states, model = bundle.item_states, load_model(bundle).all_item_states()
    trained = np.setdiff1d(np.arange(30), [3, 4])
    np.testing.assert_array_equal(states.components[trained], model.components[trained])
    assert not states.components[[3, 4]].any()
    assert states.gate is not None
    assert model.gate is not None
    np.testing.assert_allclose(states.gate[[3, 4]], np.tile(model.gate[trained].mean(axis=0), (2, 1)), atol=1e-6)
    rules = fold_rules(RefresherSettings(), bundle)
    assert {item_id for item_id in data.item_ids if rules.items.is_new(item_id)} == {"item-3", "item-4"}


def test_a_schema_of_ones_own_says_what_training_learns_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "quick", replace(ONE_GRAPH, epochs=1))
    data = typed(cyclic_interactions(), "zip", "zap")
    with pytest.raises(ValueError, match=r"none of the 1200 events .* types: zip, zap; allowed: .* positive role"):
        run_training(out=tmp_path / "bundle", interactions=data, export=False)
    events = tmp_path / "events.yaml"
    events.write_text("types: {zip: {role: positive}}")
    run_training(out=tmp_path / "bundle", interactions=data, split="none", head="mol", export=False, events=events)
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.counts.sum() == len(data) // 2
    assert bundle.event_schema.of("zip").is_encoded
    events.write_text("types: {zip: {role: lukewarm}}")
    with pytest.raises(ValueError, match=r"zip\.role='lukewarm'; allowed: positive"):
        run_training(out=tmp_path / "bundle", interactions=data, export=False, events=events)


def test_an_encoder_that_reads_actions_knows_what_was_turned_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "quick", replace(ONE_GRAPH, epochs=1))
    data = typed(cyclic_interactions(), "click", "dislike", "impression", "unheard of")
    shown = io.StringIO()
    report = run_training(
        out=tmp_path / "bundle",
        interactions=data,
        head="mol",
        actions=True,
        export=False,
        console=Console(file=shown, width=120),
    )
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.encoder.actions == ("click", "dislike")
    assert "Actions: click, dislike" in shown.getvalue()
    # What was turned down is learnt from, and is no evidence of the item.
    assert bundle.manifest.data["events"] > bundle.counts.sum() > 0
    assert report["metrics"]["num_events"] <= np.count_nonzero(data.types == 0)
    # The schema that names actions stays with the model, whatever becomes of the default.
    assert bundle.event_schema == default_schema()
    assert "events.yaml" in bundle.manifest.files
    weights = load_model(bundle).state_dict()
    assert not weights["action_embedding.weight"][0].any()
    assert weights["action_embedding.weight"][1:].abs().sum(1).min() > 0
    assert not weights["outcome_embedding.weight"][:2].any()
    assert weights["outcome_embedding.weight"][2].any()


def test_actions_that_were_not_trained_change_nothing() -> None:
    torch.manual_seed(0)
    blind = train(replace(CONFIG, epochs=1), cyclic_interactions(), stop_after_batches=1).model
    encoder = replace(CONFIG.encoder, actions=("click", "hide"))
    reads = train(replace(CONFIG, encoder=encoder, epochs=1), cyclic_interactions(), stop_after_batches=1).model
    items, times = torch.arange(10)[None], torch.arange(10)[None]
    expected = blind.encode(items, times)
    assert torch.equal(reads.encode(items + STRIDE * torch.tensor([0, 1, 2, 1, 0, 0, 2, 2, 1, 0]), times), expected)
