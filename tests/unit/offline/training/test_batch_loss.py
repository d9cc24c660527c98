"""The loss of a batch hands the head's dropouts to the negatives too."""

from dataclasses import replace

import torch
from training_scene import CONFIG

from services.offline.training.loss import batch_loss
from services.offline.training.models.mol import MolHead
from services.offline.training.models.sequential import Dropouts, SequentialModel


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
