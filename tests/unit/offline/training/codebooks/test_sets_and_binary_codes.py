"""Anisotropic quantization's appendix, on the sets that are here: what sets look like, and binary codes.

Figure 5 of arXiv:1908.10396 says that descriptors made by hand have correlated dimensions, an SVD's unequal variances.
Table 2 trains Stochastic Generative Hashing for reconstruction and for the score-aware loss.
"""

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import svds
from torch.nn import functional

from services.offline.datasets import DatasetUnavailableError, load_dataset
from services.offline.evaluation.common.embeddings import EmbeddingSource, sift
from services.offline.training.codebooks.score_aware import eta


@pytest.fixture(scope="module")
def descriptors() -> tuple[np.ndarray, np.ndarray]:
    """Items and queries of sift-5k."""
    try:
        found = sift(EmbeddingSource(), seed=0)
    except ValueError as error:
        pytest.skip(str(error))
    return found.items, found.queries


def mean_correlation(vectors: np.ndarray) -> float:
    """Between different dimensions, absolute."""
    correlation = np.corrcoef(vectors.T)
    return float(np.abs(correlation[~np.eye(len(correlation), dtype=bool)]).mean())


def test_descriptors_made_by_hand_have_correlated_dimensions(descriptors: tuple[np.ndarray, np.ndarray]) -> None:
    items, _ = descriptors
    by_chance = np.sqrt(2 / np.pi / len(items))
    assert mean_correlation(items) > 10 * by_chance
    assert items.var(axis=0).max() < 3 * items.var(axis=0).min()


def test_an_svds_dimensions_are_uncorrelated_and_have_unequal_variances() -> None:
    try:
        data = load_dataset("ml-latest-small", download=False)
    except DatasetUnavailableError as error:
        pytest.skip(str(error))
    ratings = csr_matrix((data.values.astype(float), (data.users, data.items)))
    _, values, directions = svds(ratings, k=50, random_state=0)
    films = directions.T * np.sqrt(values)
    assert mean_correlation(films) < 0.02
    assert films.var(axis=0).max() > 5 * films.var(axis=0).min()


def decoded(points: torch.Tensor, bits: int, eta_of_loss: float, *, steps: int = 1500) -> torch.Tensor:
    """A linear decoder's vectors (X, d) of sign(x W + b), trained together with the codes by straight-through Adam."""
    torch.manual_seed(0)
    width, mean = points.shape[1], points.mean(0)
    parameters = [torch.randn(width, bits) / width**0.5, torch.zeros(bits), torch.randn(bits, width) / 10 / bits**0.5]
    parameters.append(torch.zeros(width))
    encode, offset, decode, start = (parameter.requires_grad_() for parameter in parameters)
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / steps)
        batch = points[torch.randint(len(points), (500,))]
        likely = torch.sigmoid(4 * ((batch - mean) @ encode + offset))
        residual = batch - ((likely > 0.5).float() + likely - likely.detach()) @ decode - start
        along = (residual * functional.normalize(batch, dim=1)).sum(1).square()
        optimizer.zero_grad()
        (residual.square().sum(1) + (eta_of_loss - 1) * along).mean().backward()
        optimizer.step()
    with torch.no_grad():
        return ((points - mean) @ encode + offset > 0).float() @ decode + start


def test_binary_codes_for_the_score_aware_loss_find_more(descriptors: tuple[np.ndarray, np.ndarray]) -> None:
    items, queries = (functional.normalize(torch.from_numpy(part), dim=1) for part in descriptors)
    best = (queries @ items.T).argmax(dim=1, keepdim=True)

    def recall_1_at_10(eta_of_loss: float) -> float:
        found = (queries @ decoded(items, 64, eta_of_loss).T).topk(10).indices
        return float((found == best).any(dim=1).float().mean())

    assert recall_1_at_10(eta(0.2, items.shape[1])) > 1.4 * recall_1_at_10(1.0)
