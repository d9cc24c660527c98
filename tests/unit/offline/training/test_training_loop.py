"""Training: learns, repeats itself under one seed, and resumed equals uninterrupted to the bit."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from training_scene import CONFIG, WITH_USERS, cyclic_interactions

from services.algorithms.bundles.model_manifest import AbsenceShape
from services.offline.evaluation.engine.baselines import Popularity
from services.offline.evaluation.engine.metrics import summary
from services.offline.evaluation.engine.ranked_events import rank_events
from services.offline.training import Step, TrainConfig, checkpoint, train
from services.offline.training.evaluation import ModelScorer
from services.offline.training.loop import PARTS, WholeBatches, rate_factor
from services.offline.training.presets import with_dot_head, with_sasrec

VARIANTS = pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        WITH_USERS,
        with_sasrec(CONFIG),
        with_dot_head(CONFIG),
        replace(CONFIG, absence=AbsenceShape()),
        replace(CONFIG, head_rate=0.5, gate_rate=2.0, groups_per_tile=8, start_noise=0.3),
    ],
    ids=["hstu + mol", "with user component", "sasrec + mol", "hstu + dot", "tuned", "with absences"],
)


def weights_of(config: TrainConfig, **options) -> dict[str, torch.Tensor]:
    return train(config, cyclic_interactions(), **options).model.state_dict()


@VARIANTS
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(config: TrainConfig, tmp_path: Path) -> None:
    whole = weights_of(config)
    for stop_after in (1, 4, 3):
        train(config, cyclic_interactions(), out=tmp_path, resume=True, stop_after_batches=stop_after)
    resumed = train(config, cyclic_interactions(), out=tmp_path, resume=True)
    assert whole.keys() == resumed.model.state_dict().keys()
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, whole[name]), name
    assert resumed.positions == cyclic_positions() * config.epochs
    assert len(resumed.epoch_losses) == config.epochs


def cyclic_positions() -> int:
    return int((cyclic_interactions().user_counts() - 1).clip(min=0).sum())


@pytest.mark.parametrize("config", [CONFIG, with_sasrec(CONFIG)], ids=["hstu", "sasrec"])
def test_padding_a_batch_to_the_longest_history_changes_no_state(config: TrainConfig) -> None:
    """What a card's graph takes; whether a graph computes the same is for a card."""
    model = train(config, cyclic_interactions(), stop_after_batches=2).model.eval()
    items = torch.tensor([[1, 5, 2, 7], [3, 4, -1, -1], [9, 0, 8, -1]])
    times = torch.tensor([[0, 10, 70, 4_000], [5, 9, 9, 9], [1, 2, 90_000, 90_000]])
    short, long = model.encode(items, times), WholeBatches(model).encode(items, times)
    assert torch.allclose(short[items >= 0], long[items >= 0], atol=1e-6)


@pytest.mark.parametrize(("still", "rates"), [("head", {"head_rate": 0.0}), ("gate", {"gate_rate": 0.0})])
def test_head_and_gate_have_learning_rates_of_their_own(still: str, rates: dict[str, float]) -> None:
    config = replace(CONFIG, **rates)
    begun, ended = weights_of(replace(config, learning_rate=1e-12), stop_after_batches=1), weights_of(config)

    def part(name: str) -> str:
        return "gate" if "_gate." in name else "head" if name.startswith("head.") else "rest"

    moved = {part(name) for name, weight in begun.items() if not torch.equal(weight, ended[name])}
    assert moved == {"rest", "head", "gate"} - {still}


def test_one_seed_gives_one_model_on_two_threads() -> None:
    config = replace(CONFIG, encoder=replace(CONFIG.encoder, width=64, max_history=32), epochs=1, batch_sequences=256)
    interactions, threads = cyclic_interactions(400, 200, events=12_000), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        one, *others = (train(config, interactions).model.state_dict() for _ in range(4))
    finally:
        torch.set_num_threads(threads)
    assert [name for other in others for name in one if not torch.equal(one[name], other[name])] == []


def test_training_leaves_the_callers_random_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(replace(CONFIG, epochs=1), cyclic_interactions())
    assert torch.equal(torch.rand(3), expected)


@VARIANTS
def test_a_pattern_in_the_data_is_learned(config: TrainConfig) -> None:
    # More items than any user has events: a second lap would have every item seen, and nothing to choose.
    interactions = cyclic_interactions(num_users=100, num_items=50, events=2400)
    past, future = interactions.select(slice(0, 2000)), np.arange(2000, 2400)
    report = train(replace(config, epochs=8), past)
    found = rank_events(ModelScorer(report.model, report.user_index), interactions, future).ranks
    popular = Popularity()
    popular.fit(past)
    assert report.epoch_losses[-1] < report.epoch_losses[0] / 2
    assert len(found) == 400
    hits = summary(found)["hr@1"]
    assert hits > 0.5
    assert hits > 4 * summary(rank_events(popular, interactions, future).ranks)["hr@1"]


def test_a_report_adds_up(tmp_path: Path) -> None:
    steps: list[Step] = []
    report = train(CONFIG, cyclic_interactions(), progress=steps.append)
    assert report.positions == cyclic_positions() * 3 == steps[-1].positions == steps[-1].total_positions
    assert [step.positions for step in steps] == sorted(step.positions for step in steps)
    assert set(report.part_shares) == set(PARTS)
    assert sum(report.part_shares.values()) == pytest.approx(1)
    assert report.positions_per_s == pytest.approx(report.positions / report.seconds)
    assert report.peak_memory_bytes > 2**20
    assert len(report.epoch_losses) == 3


def test_a_checkpoint_of_other_settings_or_data_is_refused_by_field(tmp_path: Path) -> None:
    train(CONFIG, cyclic_interactions(), out=tmp_path, stop_after_batches=1)
    with pytest.raises(ValueError, match=r"config.learning_rate=0.005; this training has 0.001"):
        train(replace(CONFIG, learning_rate=1e-3), cyclic_interactions(), out=tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"data='[0-9a-f]{16}'; this training has '[0-9a-f]{16}'"):
        train(CONFIG, cyclic_interactions(seed=1), out=tmp_path, resume=True)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    train(CONFIG, cyclic_interactions(), out=tmp_path, stop_after_batches=1)
    (file,) = tmp_path.glob("*/progress.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 2}))
    with pytest.raises(ValueError, match=f"{file.parent}: format=2; this program reads format 1"):
        train(CONFIG, cyclic_interactions(), out=tmp_path, resume=True)


def test_a_checkpoint_is_json_and_safetensors_and_there_is_one(tmp_path: Path) -> None:
    train(CONFIG, cyclic_interactions(), out=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["progress.json", "state.safetensors"]
    assert json.loads((folder / "progress.json").read_text())["progress"]["epoch"] == 3


def test_data_without_a_second_event_is_refused() -> None:
    interactions = cyclic_interactions()
    _, first = np.unique(interactions.users, return_index=True)
    with pytest.raises(ValueError, match="no user has two events"):
        train(CONFIG, interactions.select(np.sort(first)))


def test_the_learning_rate_warms_up_and_falls_to_its_end() -> None:
    assert rate_factor(CONFIG, 0.05) == pytest.approx(0.5)
    assert rate_factor(CONFIG, 0.1) == pytest.approx(1.0)
    assert rate_factor(CONFIG, 0.55) == pytest.approx(0.55)
    assert rate_factor(CONFIG, 1.0) == pytest.approx(0.1)


def test_the_epoch_that_validates_best_counts_and_all_are_trained() -> None:
    seen: list[dict[str, torch.Tensor]] = []

    def score(model) -> float:
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return [0.1, 0.3, 0.2, 0.25, 0.2, 0.9, 0.9][len(seen) - 1]

    config = replace(CONFIG, epochs=7)
    report = train(config, cyclic_interactions(), validate=score)
    assert report.valid_scores == [0.1, 0.3, 0.2, 0.25, 0.2, 0.9, 0.9]
    for name, weight in report.model.state_dict().items():
        assert torch.equal(weight, seen[5][name]), name


def test_validation_resumes_with_its_scores_and_its_best_weights(tmp_path: Path) -> None:
    config = replace(CONFIG, epochs=4)
    interactions = cyclic_interactions()
    rows = np.arange(len(interactions) - 100, len(interactions))

    def score(model) -> float:
        return summary(rank_events(ModelScorer(model), interactions, rows).ranks)["mrr"]

    whole = train(config, interactions, validate=score)
    for stop_after in (3, 5):
        train(config, interactions, validate=score, out=tmp_path, resume=True, stop_after_batches=stop_after)
    resumed = train(config, interactions, validate=score, out=tmp_path, resume=True)
    assert resumed.valid_scores == whole.valid_scores
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta")
def test_a_checkpoint_is_restored_onto_the_models_device(tmp_path: Path) -> None:
    """A fused optimizer on a card refuses a number of steps that lies elsewhere; "meta" stands in for the card."""
    train(CONFIG, cyclic_interactions(), out=tmp_path, stop_after_batches=2)
    model = train(CONFIG, cyclic_interactions(), stop_after_batches=1).model.to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    identity = {"config": CONFIG.as_dict(), "data": cyclic_interactions().fingerprint()}
    assert checkpoint.load(tmp_path, identity, model, optimizer) is not None
    assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"meta"}
