"""Fine-tune text MoL on pairs of a query and its document.

Training uses in-batch negatives, AdamW, linear warm-up and decay, and the mutual-information loss over the positives'
pair weights (arXiv:2407.15462, appendix A.4.2 and equation 3). The lower layers are frozen and their output is cached.

Letters: B pairs of a batch, X documents, P component pairs.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from services.algorithms.bundles.model_manifest import HeadShape
from services.algorithms.models.sentence_encoder import model_folder
from services.algorithms.models.text_model_folder import load_body
from services.algorithms.scoring.states import FloatArray, ItemStates, PairGate
from services.algorithms.text.word_pieces import WordPieces
from services.offline.training.loss import mutual_information
from services.offline.training.models.text_mol import Aggregation, TextMol
from services.offline.training.progress import Progress, unreported
from services.offline.training.seeded import seeded
from services.offline.training.text_mol.frozen_layers import FrozenOutputs


@dataclass(frozen=True, kw_only=True, slots=True)
class TextMolSettings:
    """Settings of `train_text_mol`. Raises: ValueError naming field, value and allowed range.

    `components` is P_q = P_x (the paper's grid: 2, 4, 8, 16). `trained_layers`: the number of the body's last layers
    that are trained. `learning_rate` is the peak, after a linear warm-up and before a linear decay.
    `half_precision` multiplies in bfloat16, 5 times as fast on a processor with AMX.
    """

    components: int = 4
    steps: int = 300
    batch: int = 64
    learning_rate: float = 2e-4
    weight_decay: float = 0.01
    warmup_fraction: float = 0.1
    tau: float = 0.05
    gate_hidden: int = 64
    mutual_information_weight: float = 0.001
    trained_layers: int = 2
    max_tokens: int = 64
    half_precision: bool = True

    def __post_init__(self) -> None:
        for name, least in (("components", 1), ("steps", 1), ("batch", 2), ("gate_hidden", 1), ("max_tokens", 3),
                            ("trained_layers", 1), ("weight_decay", 0), ("mutual_information_weight", 0)):  # fmt: skip
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: at least {least}")
        for name in ("learning_rate", "tau"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: above 0, at most 1")
        if not 0 <= self.warmup_fraction <= 1:
            raise ValueError(f"warmup_fraction={self.warmup_fraction}; allowed: 0 to 1")

    def head(self, width: int) -> HeadShape:
        """Return the head's shape for a body of this width."""
        return HeadShape(
            kind="mol",
            num_query_components=self.components,
            num_item_components=self.components,
            component_width=width,
            tau=self.tau,
            gate_hidden=self.gate_hidden,
        )

    def rate_factor(self, step: int) -> float:
        """Return the learning rate's factor at a step from 0."""
        done, warm = (step + 1) / self.steps, self.warmup_fraction
        if done < warm:
            return done / warm
        return max(1.0 - (done - warm) / max(1.0 - warm, 1e-9), 1.0 / self.steps)


Pairs = Sequence[tuple[str, int]]
Rows = npt.NDArray[np.int64]


class Prepared:
    """A fit's pairs as inputs of the trained layers."""

    def __init__(
        self,
        pairs: Pairs,
        documents: Sequence[str],
        settings: TextMolSettings,
        *,
        folder: Path | None = None,
        progress: Progress = unreported,
    ) -> None:
        """Read the body from `folder` (None: MiniLM) and cache its lower layers' output.

        Raises: ValueError without pairs or documents, or for a pair's unknown document; the errors of `load_body`.
        """
        if not pairs or not documents:
            raise ValueError(f"{len(pairs)} pairs and {len(documents)} documents; allowed: at least 1 of each")
        asked = np.array([row for _, row in pairs], dtype=np.int64)
        if asked.min() < 0 or asked.max() >= len(documents):
            raise ValueError(f"pairs name documents {asked.min()}..{asked.max()}; allowed: 0..{len(documents) - 1}")
        folder = folder or model_folder()
        self.body = load_body(folder).requires_grad_(False)
        self.tokenizer = WordPieces.read(folder / "vocab.txt")
        frozen = self.body.shape.layers - settings.trained_layers
        if frozen < 1:
            most = f"at most {self.body.shape.layers - 1}, one layer less than the body in {folder}"
            raise ValueError(f"trained_layers={settings.trained_layers}; allowed: {most}")
        self.joined = frozen
        self.max_tokens = settings.max_tokens
        self.body.half_precision = settings.half_precision
        self.queries = list(dict.fromkeys(query for query, _ in pairs))
        row_of = {query: row for row, query in enumerate(self.queries)}
        self.pairs: Rows = np.unique(np.column_stack([[row_of[query] for query, _ in pairs], asked]), axis=0)
        total = len(self.queries) + len(documents)
        self.cached_queries = self.keep(self.queries, lambda done: progress("lower layers", done, total, math.nan))
        first = len(self.queries)
        self.cached_documents = self.keep(
            documents, lambda done: progress("lower layers", first + done, total, math.nan)
        )

    def keep(self, texts: Sequence[str], progress: Callable[[int], None] | None = None) -> FrozenOutputs:
        """Cache the first trained layer's input for these texts."""
        return FrozenOutputs(
            texts, self.tokenizer, self.body, joined=self.joined, max_tokens=self.max_tokens, progress=progress
        )


@dataclass(frozen=True, kw_only=True)
class TextFit:
    """A fine-tuned encoder with its documents' states. `losses`: one a step. `seconds`: the training's duration."""

    model: TextMol
    tokenizer: WordPieces
    settings: TextMolSettings
    item_states: ItemStates
    pair_gate: PairGate
    losses: FloatArray
    seconds: float


def train_text_mol(
    pairs: Pairs,
    documents: Sequence[str],
    settings: TextMolSettings,
    seed: int,
    *,
    folder: Path | None = None,
    progress: Progress = unreported,
) -> TextFit:
    """Fine-tune on pairs (query text, row of its document) and encode all documents.

    progress: stages are "lower layers", "training", with the mean loss of 20 steps, and "documents".
    Raises: the errors of `Prepared`; ValueError if all pairs have one document.
    """
    data = Prepared(pairs, documents, settings, folder=folder, progress=progress)
    if len(np.unique(data.pairs[:, 1])) < 2:
        raise ValueError("all pairs have one document; in-batch negatives need at least 2")
    with seeded(seed):
        head = settings.head(data.body.shape.width)
        model = TextMol(data.body, head, joined=data.joined, max_tokens=data.max_tokens)
        trained = _trained(model)
        optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay)
        began, losses = time.perf_counter(), []
        for step, rows in enumerate(_batches(data.pairs, settings, seed)):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * settings.rate_factor(step)
            loss = _loss(model, data, rows, settings)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            progress("training", step + 1, settings.steps, float(np.mean(losses[-20:])))
        seconds = time.perf_counter() - began
        model.requires_grad_(False)
        states = ItemStates(components=encoded(model, data.cached_documents, model.document, progress))
        model.body.half_precision = False
    return TextFit(
        model=model,
        tokenizer=data.tokenizer,
        settings=settings,
        item_states=states,
        pair_gate=model.pair_gate(),
        losses=np.array(losses, dtype=np.float32),
        seconds=seconds,
    )


@torch.no_grad()
def encoded(model: TextMol, texts: FrozenOutputs, side: Aggregation, progress: Progress = unreported) -> FloatArray:
    """Return components (n, K, D) of cached texts."""
    components = np.empty((len(texts), len(side.tokens), model.body.shape.width), dtype=np.float32)
    done = 0
    for rows in texts.by_length():
        hidden, real = texts.batch(rows)
        components[rows] = model.from_kept(hidden, real, side).numpy()
        done += len(rows)
        progress("documents", done, len(texts), math.nan)
    return components


def _trained(model: TextMol) -> list[nn.Parameter]:
    upper = model.body.layers_from(model.joined)
    for parameter in upper:
        parameter.requires_grad_(True)
    added = (model.query, model.document, model.gate)
    return [*upper, *(parameter for part in added for parameter in part.parameters())]


def _batches(pairs: Rows, settings: TextMolSettings, seed: int) -> Iterator[Rows]:
    """Yield the pairs (B, 2) of each step from one shuffled pass after another; B is at most `len(pairs)`."""
    rng = np.random.default_rng(seed)
    size, order, at = min(settings.batch, len(pairs)), np.zeros(0, dtype=np.int64), 0
    for _ in range(settings.steps):
        if at + size > len(order):
            order, at = rng.permutation(len(pairs)), 0
        yield pairs[order[at : at + size]]
        at += size


def _loss(model: TextMol, data: Prepared, rows: Rows, settings: TextMolSettings) -> Tensor:
    """Return the softmax loss over the batch's distinct documents, without other documents of the same query."""
    asked, own = rows[:, 0], rows[:, 1]
    documents, target = np.unique(own, return_inverse=True)
    queries = model.from_kept(*data.cached_queries.batch(asked), model.query)
    scores, weights = model.scores(queries, model.from_kept(*data.cached_documents.batch(documents), model.document))
    logits = scores / settings.tau
    known = np.isin(
        asked[:, None] * (int(data.pairs[:, 1].max()) + 1) + documents[None, :],
        data.pairs[:, 0] * (int(data.pairs[:, 1].max()) + 1) + data.pairs[:, 1],
    )
    known[np.arange(len(rows)), target] = False
    logits = logits.masked_fill(torch.from_numpy(known), float("-inf"))
    loss = functional.cross_entropy(logits, torch.from_numpy(target))
    if settings.mutual_information_weight:
        positive = weights[torch.arange(len(rows)), torch.from_numpy(target)]
        loss = loss + settings.mutual_information_weight * mutual_information(positive)
    return loss
