"""Text MoL: its states are the retrieval library's own, padding says nothing, and it begins beside the mean."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from services.algorithms.bundles.model_manifest import HeadShape
from services.algorithms.indexes.by_name import make_index, parse_algorithm
from services.algorithms.models.text_model_folder import load_body, mean_of_tokens
from services.algorithms.ops.mol_scores import MolScorer
from services.algorithms.scoring.states import ItemStates, QueryStates
from services.offline.training.models.text_mol import TextMol
from tests.unit.text.model_folder_scene import bert_folder

HEAD = HeadShape(kind="mol", num_query_components=2, num_item_components=3, component_width=16, tau=0.05, gate_hidden=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return bert_folder(tmp_path)


def model_of(folder: Path, head: HeadShape = HEAD, *, joined: int = 1, stirred: bool = True) -> TextMol:
    """A model over random weights; `stirred`: the mixture's own are random, too, as after training."""
    torch.manual_seed(1)
    model = TextMol(load_body(folder), head, joined=joined, max_tokens=12).requires_grad_(False)
    for part in (model.query, model.document, model.gate):
        if stirred:
            for parameter in part.parameters():
                parameter.normal_(std=0.5)
    return model


def texts(count: int, length: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(4, 14, (count, length), generator=torch.Generator().manual_seed(seed))
    lengths = torch.randint(2, length + 1, (count, 1), generator=torch.Generator().manual_seed(seed + 1))
    real = torch.arange(length)[None] < lengths
    return ids * real, real


def of_documents(model: TextMol, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    return model.from_kept(model.lower(ids, real), real, model.document)


@pytest.mark.parametrize("algorithm", ["brute_force", "exact", "exact_low_precision"])
def test_index_scores_equal_the_models_and_are_certified(folder: Path, algorithm: str) -> None:
    model = model_of(folder)
    queries, documents = model.query_components(*texts(5)), of_documents(model, *texts(40, seed=2))
    expected, _ = model.scores(queries, documents)
    scorer = MolScorer(ItemStates(components=documents.numpy()), model.pair_gate())
    index = make_index(parse_algorithm(algorithm), scorer)
    found = index.search(QueryStates(components=queries.numpy()), 7)
    np.testing.assert_allclose(
        found.scores, np.take_along_axis(expected.numpy(), found.item_indices, axis=1), atol=2e-6
    )
    np.testing.assert_allclose(found.scores, np.sort(expected.numpy(), axis=1)[:, :-8:-1], atol=2e-6)
    assert all(certificate.kind == "exact" for certificate in found.certificates)


def test_padding_and_company_change_no_component(folder: Path) -> None:
    model = model_of(folder)
    ids, real = texts(6)
    together = model.query_components(ids, real)
    for row in range(6):
        length = int(real[row].sum())
        alone = model.query_components(ids[row : row + 1, :length], real[row : row + 1, :length])
        torch.testing.assert_close(alone[0], together[row], atol=1e-5, rtol=0)


def test_components_are_unit_vectors_of_their_own(folder: Path) -> None:
    model = model_of(folder)
    components = of_documents(model, *texts(6))
    assert components.shape == (6, 3, 16)
    torch.testing.assert_close(components.norm(dim=-1), torch.ones(6, 3))
    cosines = components @ components.transpose(1, 2)
    assert float(cosines[:, 0, 1].max()) < 0.9999


def test_pair_weights_are_a_distribution_that_the_cosines_alone_decide(folder: Path) -> None:
    model = model_of(folder)
    queries, documents = model.query_components(*texts(5)), of_documents(model, *texts(4, seed=2))
    scores, weights = model.scores(queries, documents)
    assert weights.shape == (5, 4, 6)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(5, 4))
    # A rotation of both sides' space keeps all cosines, and so everything.
    rotation = torch.linalg.qr(torch.randn(16, 16)).Q
    turned, same = model.scores(queries @ rotation, documents @ rotation)
    torch.testing.assert_close(turned, scores, atol=1e-5, rtol=0)
    torch.testing.assert_close(same, weights, atol=1e-5, rtol=0)


def test_each_sides_tokens_are_its_own(folder: Path) -> None:
    model = model_of(folder, replace(HEAD, num_item_components=2))
    ids, real = texts(3)
    assert not torch.allclose(model.query_components(ids, real), of_documents(model, ids, real), atol=1e-2)


def test_a_fresh_mixture_stands_beside_the_mean_pooled_body(folder: Path) -> None:
    """Fine-tuning then begins at what the body knows. (Random weights: how MiniLM's own begin is not measured.)"""
    mixture = model_of(folder, stirred=False)
    ids, real = texts(8)
    body = load_body(folder).requires_grad_(False)
    pooled = mean_of_tokens(body.run(body.embed(ids), real, 0, body.shape.layers).float(), real)
    cosines = (of_documents(mixture, ids, real) * functional.normalize(pooled, dim=-1)[:, None]).sum(dim=-1)
    assert float(cosines.min()) > 0.8
    _, weights = mixture.scores(mixture.query_components(ids, real), of_documents(mixture, ids, real))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 6), atol=0.1, rtol=0)


def test_what_the_lower_layers_gave_may_be_handed_in(folder: Path) -> None:
    model = model_of(folder, joined=2)
    ids, real = texts(4)
    kept = model.from_kept(model.lower(ids, real), real, model.query)
    torch.testing.assert_close(kept, model.query_components(ids, real))
    at_the_vocabulary = model_of(folder, joined=0)
    torch.testing.assert_close(at_the_vocabulary.lower(ids, real), at_the_vocabulary.body.embed(ids))


def test_a_head_that_does_not_fit_the_body_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"joined=3; allowed: 0 to 2"):
        model_of(folder, joined=3)
    with pytest.raises(ValueError, match=r"head\.component_width=8; the body's width is 16"):
        model_of(folder, replace(HEAD, component_width=8))
