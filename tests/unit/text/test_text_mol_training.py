"""Fine-tuning text encoders: it learns, from the seed alone, and changes what it may."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from services.algorithms.indexes.brute_force import BruteForce
from services.algorithms.ops.mol_scores import MolScorer
from services.training.text_mol import Step, TextFit, TextMolSettings, train_text_mol
from services.training.text_mol.fit import Prepared, encoded
from tests.unit.text.model_folder_scene import bert_folder

DOCUMENTS = ["space space", "cat", "a dog!", "movies", "the cat dog", "中", "space cat", "dog dog dog"]
# What one asks for is never written in what one wants: only training can tell.
PAIRS = [("the", 0), ("the the", 1), ("a a", 2), ("!", 3), ("! !", 4), ("movie", 5), ("a the", 6), ("the a !", 7)]
SMALL = TextMolSettings(
    steps=60, batch=8, components=2, gate_hidden=4, learning_rate=2e-2, max_tokens=8, half_precision=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_folder(tmp_path_factory.mktemp("body"))


@pytest.fixture(scope="module")
def fit(folder: Path) -> TextFit:
    return train_text_mol(PAIRS, DOCUMENTS, SMALL, 0, folder=folder)


def test_a_fit_finds_what_training_alone_could_tell(fit: TextFit) -> None:
    assert fit.losses[-1] < 0.1 < 1.0 < fit.losses[0]
    index = BruteForce(MolScorer(fit.item_states, fit.pair_gate))
    found = index.search(fit.query_states([query for query, _ in PAIRS]), 1)
    assert found.item_indices[:, 0].tolist() == [document for _, document in PAIRS]


def test_the_dot_product_learns_by_the_same_steps(folder: Path) -> None:
    dot = train_text_mol(PAIRS, DOCUMENTS, replace(SMALL, kind="dot"), 0, folder=folder)
    assert dot.losses[-1] < 0.3
    assert dot.item_states.components.shape == (8, 1, 16)
    assert dot.pair_gate is None
    assert dot.query_states(["the"]).components.shape == (1, 1, 16)


def test_the_seed_alone_decides(folder: Path, fit: TextFit) -> None:
    torch.randn(5)  # whatever was drawn before
    again = train_text_mol(PAIRS, DOCUMENTS, SMALL, 0, folder=folder)
    np.testing.assert_array_equal(again.item_states.components, fit.item_states.components)
    other = train_text_mol(PAIRS, DOCUMENTS, SMALL, 1, folder=folder)
    assert not np.allclose(other.item_states.components, fit.item_states.components, atol=1e-2)


def test_the_lower_layers_stay_and_one_preparation_serves_several_fits(folder: Path, fit: TextFit) -> None:
    prepared = Prepared(PAIRS, DOCUMENTS, SMALL, folder=folder)
    before = {name: value.clone() for name, value in prepared.body.state_dict().items()}
    shared = [train_text_mol(PAIRS, DOCUMENTS, SMALL, 0, prepared=prepared) for _ in range(2)]
    for one in shared:
        np.testing.assert_array_equal(one.item_states.components, fit.item_states.components)
    for name, value in prepared.body.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        changed = not torch.equal(shared[0].model.body.state_dict()[name], value)
        assert changed == name.startswith(("layers.1", "layers.2")) or name.endswith("key.bias")


def test_all_of_a_body_may_be_trained_with_the_tokens_in_its_vocabulary(folder: Path) -> None:
    whole = train_text_mol(PAIRS, DOCUMENTS, replace(SMALL, trained_layers=None, learning_rate=5e-3), 0, folder=folder)
    assert whole.model.joined == 0
    assert whole.losses[-1] < 0.5 * whole.losses[0]
    original = Prepared(PAIRS, DOCUMENTS, SMALL, folder=folder).body.state_dict()["words.weight"]
    assert not torch.equal(whole.model.body.state_dict()["words.weight"], original)


def test_kept_lower_layers_give_the_states_of_the_whole_model(folder: Path, fit: TextFit) -> None:
    prepared = Prepared(PAIRS, DOCUMENTS, SMALL, folder=folder)
    texts = ["the cat", "", "movies! " * 20, "dog"]
    kept = encoded(fit.model, prepared.keep(texts), fit.model.query)
    # Half-precision storage of the kept layers is all the difference.
    np.testing.assert_allclose(kept, fit.query_states(texts).components, atol=5e-3)


def test_half_precision_costs_little(folder: Path) -> None:
    rough = train_text_mol(PAIRS, DOCUMENTS, replace(SMALL, half_precision=True), 0, folder=folder)
    assert rough.losses[-1] < 0.3
    assert not rough.model.body.half_precision


def test_another_document_of_the_query_is_no_negative(folder: Path) -> None:
    """One query whose two documents are all there is: nothing to be told apart, so no loss."""
    only = [("the", 0), ("the", 1)]
    found = train_text_mol(
        only, DOCUMENTS[:2], replace(SMALL, steps=2, mutual_information_weight=0.0), 0, folder=folder
    )
    np.testing.assert_allclose(found.losses, 0, atol=1e-6)


def test_the_mutual_information_loss_is_part_of_it(folder: Path) -> None:
    first = [
        train_text_mol(PAIRS, DOCUMENTS, replace(SMALL, steps=1, mutual_information_weight=weight), 0, folder=folder)
        for weight in (0.0, 1.0)
    ]
    assert first[0].losses[0] != first[1].losses[0]


def test_progress_is_told_from_beginning_to_end(folder: Path) -> None:
    told: list[Step] = []
    train_text_mol(PAIRS, DOCUMENTS, replace(SMALL, steps=3), 0, folder=folder, listener=told.append)
    assert list(dict.fromkeys(step.part for step in told)) == ["lower layers", "training", "documents"]
    for part in ("lower layers", "training", "documents"):
        steps = [step for step in told if step.part == part]
        assert [step.done for step in steps] == sorted(step.done for step in steps)
        assert steps[-1].done == steps[-1].total
