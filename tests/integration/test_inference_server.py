"""The encoder on the real inference server: the same states as PyTorch, and never those of another model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from services.algorithms.bundles.model_bundle import Bundle, load_bundle
from services.encoder.adapters.inference_server import InferenceServerEncoder
from services.encoder.domain import EncodeJob
from services.offline.training.bundling import load_model
from services.platform.errors import PreconditionFailed

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def encoder_at(address: str, bundle: Bundle, *, model_version: str) -> InferenceServerEncoder:
    head = bundle.manifest.head
    return InferenceServerEncoder(
        address,
        model_version=model_version,
        max_history=bundle.max_history,
        components_shape=(head.num_query_components, head.component_width),
        has_gate=head.is_mixture,
        uses_user_index=bundle.manifest.encoder.uses_user_index,
    )


def test_another_models_server_is_refused_naming_both_versions(inference_server: str, small_bundle: Path) -> None:
    bundle = load_bundle(small_bundle)
    encoder_at(inference_server, bundle, model_version=bundle.model_version).check()
    with pytest.raises(PreconditionFailed, match=f"{bundle.model_version}.*bundle is feed"):
        encoder_at(inference_server, bundle, model_version="feed").check()


@torch.no_grad()
def test_the_served_states_equal_pytorchs(inference_server: str, small_bundle: Path) -> None:
    bundle = load_bundle(small_bundle)
    model = load_model(bundle)
    rng = np.random.default_rng(0)
    jobs = []
    for length in (1, 2, 7, bundle.max_history // 2, bundle.max_history):
        times = np.sort(rng.integers(10**9, 10**9 + 10**7, length))
        jobs.append(
            EncodeJob(
                item_index=rng.integers(0, bundle.num_items, length),
                event_time=times,
                user_index=-1,
                positions=[length - 1, length // 2],
            )
        )
    served = encoder_at(inference_server, bundle, model_version=bundle.model_version).encode(jobs)
    for job, states in zip(jobs, served, strict=True):
        components, gate = model.states_at(
            torch.from_numpy(np.asarray(job.item_index))[None],
            torch.from_numpy(np.asarray(job.event_time))[None],
            torch.tensor([-1]) if bundle.manifest.encoder.uses_user_index else None,
            torch.tensor([list(job.positions)]),
        )
        np.testing.assert_allclose(states.components, components[0].numpy(), atol=1e-4)
        assert gate is not None
        np.testing.assert_allclose(states.gate, gate[0].numpy(), atol=1e-4)


def test_the_server_keeps_keys_and_values_of_a_user_and_drops_them_when_told(
    inference_server: str, small_bundle: Path
) -> None:
    bundle = load_bundle(small_bundle)
    encoder = encoder_at(inference_server, bundle, model_version=bundle.model_version)
    rng = np.random.default_rng(1)
    items = rng.integers(0, bundle.num_items, 60)
    times = np.sort(rng.integers(10**9, 10**9 + 10**7, 60))
    key = int(rng.integers(1 << 60))

    def jobs(cache_key: int | None) -> list[EncodeJob]:
        return [
            EncodeJob(items[:length], times[:length], -1, [length - 2, length - 1], cache_key=cache_key)
            for length in (40, 41, 44, 60)
        ]

    kept, whole = encoder.encode(jobs(key)), encoder.encode(jobs(None))
    for mine, expected in zip(kept, whole, strict=True):
        np.testing.assert_allclose(mine.components, expected.components, atol=1e-4)
    counts = encoder.cache_counts()
    assert (counts.hits, counts.misses) == (3, 1)
    # All that was sent before: the state before the next event was remembered, the others lie behind.
    assert counts.reused_events == 40 + 41 + 44
    encoder.drop([key])
    after = encoder.cache_counts()
    assert after.bytes < counts.bytes
    encoder.close()
