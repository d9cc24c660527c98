"""The loss of a batch hands the head's dropouts to the negatives too, and draws negatives per group."""

from dataclasses import replace

import torch
from training_scene import CONFIG

from services.offline.training.loss import batch_loss
from services.offline.training.models.mol import Dropouts, MolHead
from services.offline.training.models.sequential import SequentialModel


def test_pair_dropout_reaches_the_negatives() -> None:
    config = replace(CONFIG, dropouts=Dropouts(pair=0.5))
    model = SequentialModel(config.encoder, config.head, num_items=30, dropouts=config.dropouts).train()
    encoded, targets = torch.randn(20, 16), torch.arange(20)
    assert isinstance(model.head, MolHead)
    torch.manual_seed(1)
    components, gate = model.head.item_states(model.item_rows[targets])
    model.head.score_pairs(model.head.query_states(encoded), (components, gate))
    after_positives = torch.rand(1)
    torch.manual_seed(1)
    batch_loss(model, config, encoded, None, targets, torch.Generator().manual_seed(0))
    # Masks for the negatives were drawn after those for the positives.
    assert torch.rand(1) != after_positives


def test_a_tile_of_several_groups_has_as_many_draws_of_negatives() -> None:
    # 16,384 pairs are 2,048 positions with 8 negatives; of those a 128th is 16.
    config = replace(CONFIG, groups_per_tile=128)
    model = SequentialModel(config.encoder, config.head, num_items=30, dropouts=config.dropouts).train()
    used, expected = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    batch_loss(model, config, torch.randn(40, 16), None, torch.arange(40) % 30, used)
    torch.randint(30, (3, 8), generator=expected)
    assert torch.equal(used.get_state(), expected.get_state())
