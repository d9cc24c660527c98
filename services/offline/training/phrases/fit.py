"""Train a phrase model: from questions with documents to an encoder, an output layer and a shortlist.

Training follows arXiv:2406.06739, A.3 (Adam, linear warm-up, linear decay) on a smaller scale: a CPU trains the last
two layers on cached activations of the others, a GPU trains all. The new output layer has its own learning rate,
because tens of steps of 5e-5 would hardly change it. It starts at the tokens' frequencies along the mean output, so
that the partition sum is 1; from zero, the first hundred steps would only reduce log^2 V of l3. Equal seeds train equal
models on one machine and number of threads.

Letters: N questions, B of a batch, s positions, D width, V vocabulary.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.algorithms.generation.generator import Generator, GeneratorSettings
from services.algorithms.generation.vocabulary import PhraseVocabulary
from services.algorithms.models.sentence_encoder import model_folder
from services.algorithms.models.text_model_folder import load_body
from services.algorithms.text.word_pieces import WordPieces
from services.offline.training.models.phrase_nar import PhraseEncoder
from services.offline.training.phrases.identifiers import Identifiers, identifiers_of
from services.offline.training.phrases.losses import PAD, phrase_losses
from services.offline.training.phrases.questions import EncodedQuestions, Questions, drawn_targets, training_questions
from services.offline.training.phrases.shortlist_fit import ShortlistSize, covered, fit_shortlist
from services.offline.training.progress import Progress, unreported
from services.offline.training.seeded import seeded

FloatArray = npt.NDArray[np.float32]

# Too few held-out questions would end training by chance.
_HELD_OUT_SHARE, _FEWEST_HELD_OUT, _MOST_HELD_OUT = 0.05, 50, 256
_WAITED_EPOCHS = 2
_WARMUP = 0.1  # share of the training
_SMALL_NOISE = 0.02  # as BERT initialises weights


@dataclass(frozen=True, kw_only=True, slots=True)
class PhraseSettings:
    """Settings of `train_phrases`. `positions`, `shortlist`: None derives them. `least_steps`: with few questions
    training exceeds `epochs` to make this many steps. `seconds`: limit of the training time, towards which the learning
    rate decays.
    """

    positions: int | None = None
    max_tokens: int = 64
    epochs: int = 8
    least_steps: int = 256
    batch: int = 256
    encoder_rate: float = 2e-4
    output_rate: float = 5e-3
    shortlist: ShortlistSize | None = None
    seconds: float | None = None
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "encoder_rate", "output_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; allowed: above 0")
        if self.least_steps < 0:
            raise ValueError(f"least_steps={self.least_steps}; allowed: at least 0")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds={self.seconds}; allowed: above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPhrases:
    """A trained model. weights (V, D), centers (m, D) float32; sets (m, r) int32."""

    encoder: PhraseEncoder
    pieces: WordPieces
    tokenizer: PhraseVocabulary
    identifiers: Identifiers
    weights: FloatArray
    centers: FloatArray
    sets: npt.NDArray[np.int32]
    shortlist: ShortlistSize
    report: dict[str, Any] = field(default_factory=dict)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> FloatArray:
        """Return x (B, 1+s, D) of B queries, which may have no words."""
        if not texts:
            return np.zeros((0, self.encoder.shape.positions + 1, self.encoder.shape.width), dtype=np.float32)
        ids, mask = self.pieces.batch(texts, max_tokens=self.encoder.shape.max_tokens)
        device = next(self.encoder.parameters()).device
        x = self.encoder(torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device))
        return np.ascontiguousarray(x.cpu().numpy(), dtype=np.float32)

    def generator(self, settings: GeneratorSettings | None = None) -> Generator:
        """Return a generator. Its item rows are document rows, and k defaults to that of the shortlist."""
        return Generator.build(
            self.weights,
            self.centers,
            self.sets,
            self.identifiers.tokens,
            self.identifiers.texts,
            self.identifiers.documents,
            max_tokens=self.identifiers.positions,
            precision="float16",
            settings=settings or GeneratorSettings(sets=self.shortlist.joined),
        )


def train_phrases(
    pairs: Sequence[tuple[str, int]],
    documents: Sequence[Sequence[str]],
    tokenizer: PhraseVocabulary,
    settings: PhraseSettings,
    seed: int,
    *,
    encoder: Callable[[int], tuple[PhraseEncoder, WordPieces]] | None = None,
    progress: Progress = unreported,
) -> TrainedPhrases:
    """Train on (query text, document row) pairs; documents[row]: the document's identifiers, which are also questions.

    encoder: makes an encoder for s and its word pieces; MiniLM by default. progress: stages are questions, training and
    shortlist.
    Raises: ValueError naming field, value and what is allowed; if MiniLM's weights are not installed.
    """
    with seeded(seed):
        identifiers = identifiers_of(documents, tokenizer, positions=settings.positions)
        if encoder is None:
            folder = model_folder()
            words = WordPieces.read(folder / "vocab.txt")
            body, positions = load_body(folder), identifiers.positions
            started = PhraseEncoder(body, positions=positions, max_tokens=settings.max_tokens), words
        else:
            started = encoder(identifiers.positions)
        return _Training(pairs, documents, tokenizer, identifiers, settings, seed, *started, progress).run()


class _Training:
    def __init__(
        self,
        pairs: Sequence[tuple[str, int]],
        documents: Sequence[Sequence[str]],
        tokenizer: PhraseVocabulary,
        identifiers: Identifiers,
        settings: PhraseSettings,
        seed: int,
        encoder: PhraseEncoder,
        pieces: WordPieces,
        progress: Progress,
    ) -> None:
        self.settings, self.seed, self.identifiers, self.tokenizer = settings, seed, identifiers, tokenizer
        self.pieces, self.progress = pieces, progress
        self.device = torch.device(settings.device)
        self.all_layers = self.device.type != "cpu"
        # bfloat16 products are slower than float32 on a CPU without units for them, 2 to 4 times faster with AVX-512's.
        units = torch.cpu.get_capabilities()
        self.half = self.device.type != "cpu" or bool(units.get("amx_bf16") or units.get("avx512_bf16"))
        self.encoder = encoder.to(self.device)
        self.rng = np.random.default_rng(seed)
        held_out = min(_MOST_HELD_OUT, int(len(pairs) * _HELD_OUT_SHARE))
        held_out = held_out if held_out >= _FEWEST_HELD_OUT else 0
        # Each text's identifier, or -1.
        texts = [text for each in documents for text in each]
        sequences = tokenizer.encode_all(texts)
        own = {text: identifiers.row_of.get(tuple(seq), -1) for text, seq in zip(texts, sequences, strict=True)}
        self.questions, self.aside = training_questions(
            pairs, documents, lambda text: own.get(text, -1), held_out=held_out, seed=seed
        )
        self.begun = time.perf_counter()
        self.inputs, self.aside_inputs = self._encoded(self.questions), self._encoded(self.aside)
        trained = encoder.trained(all_layers=self.all_layers)
        for weight in encoder.parameters():
            weight.requires_grad_(False)
        for weight in trained:
            weight.requires_grad_(True)
        self.weights = self._first_weights().requires_grad_(True)
        groups = [
            {"params": trained, "lr": settings.encoder_rate, "first": settings.encoder_rate},
            {"params": [self.weights], "lr": settings.output_rate, "first": settings.output_rate},
        ]
        self.optimizer = torch.optim.Adam(groups)

    def run(self) -> TrainedPhrases:
        settings = self.settings
        aside_targets = drawn_targets(self.aside, self.identifiers, np.random.default_rng(self.seed))
        best, best_state, waited, epoch_losses, held_out_losses = float("inf"), self._state(), 0, [], []
        prepared = time.perf_counter()
        batches_of_epoch = max(1, -(-len(self.questions) // settings.batch))
        epochs = max(settings.epochs, -(-settings.least_steps // batches_of_epoch))
        total = batches_of_epoch * epochs
        done = 0
        for _ in range(epochs):
            targets = torch.from_numpy(drawn_targets(self.questions, self.identifiers, self.rng))
            summed = 0.0
            for rows in self.inputs.batches(settings.batch, self.rng):
                spent = time.perf_counter() - prepared
                share = max(done / total, spent / settings.seconds if settings.seconds else 0.0)
                if share >= 1.0:
                    break
                loss = self._step(rows, targets[rows], share, done)
                summed += loss * len(rows)
                done += 1
                self.progress("training", done, total, loss)
            epoch_losses.append(summed / len(self.questions))
            if len(self.aside):
                held_out_losses.append(self._held_out(aside_targets))
                waited = 0 if held_out_losses[-1] < best else waited + 1
                if held_out_losses[-1] < best:
                    best, best_state = held_out_losses[-1], self._state()
            ended = settings.seconds is not None and time.perf_counter() - prepared >= settings.seconds
            if ended or waited >= _WAITED_EPOCHS:
                break
        if len(self.aside):
            self.encoder.load_state_dict(best_state[0])
            self.weights.data.copy_(best_state[1])
        trained_at = time.perf_counter()
        self.encoder.eval()
        centers, sets, size, coverage = self._shortlist()
        return TrainedPhrases(
            encoder=self.encoder.cpu(),
            pieces=self.pieces,
            tokenizer=self.tokenizer,
            identifiers=self.identifiers,
            weights=self.weights.detach().cpu().numpy(),
            centers=centers.cpu().numpy(),
            sets=sets.cpu().numpy(),
            shortlist=size,
            report={
                "questions": len(self.questions),
                "held_out_questions": len(self.aside),
                "identifiers": len(self.identifiers),
                "identifiers_left_out": self.identifiers.left_out,
                "identifiers_cut": self.identifiers.cut,
                "positions": self.identifiers.positions,
                "vocabulary": len(self.tokenizer),
                "steps": done,
                "epochs": len(epoch_losses),
                "epoch_losses": epoch_losses,
                "held_out_losses": held_out_losses,
                "prepare_seconds": prepared - self.begun,
                "train_seconds": trained_at - prepared,
                "shortlist_seconds": time.perf_counter() - trained_at,
                "shortlist": asdict(size),
                "shortlist_covers": coverage,
                "half": self.half,
                "seed": self.seed,
            },
        )

    def _encoded(self, questions: Questions) -> EncodedQuestions:
        done = 0

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            self.progress("questions", done, len(questions), math.nan)

        return EncodedQuestions(
            self.encoder,
            self.pieces,
            questions.texts,
            keep_lower=not self.all_layers,
            half=self.half,
            progress=count,
        )

    def _outputs(self, inputs: EncodedQuestions, rows: npt.NDArray[np.int64]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            return inputs.outputs(self.encoder, rows, self.device).float()

    def _step(self, rows: npt.NDArray[np.int64], targets: Tensor, share: float, done: int) -> float:
        factor = (share / _WARMUP if share < _WARMUP else (1.0 - share) / (1.0 - _WARMUP)) if done else 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = group["first"] * factor
        x = self._outputs(self.inputs, rows)
        losses = phrase_losses(x, self.weights, targets.to(self.device), half=self.half)
        self.optimizer.zero_grad()
        torch.autograd.backward(losses.total)
        self.optimizer.step()
        return float(losses.total.detach())

    @torch.no_grad()
    def _held_out(self, targets: npt.NDArray[np.int64]) -> float:
        """Return the mean l1 of the held-out questions."""
        total = 0.0
        for rows in self.aside_inputs.batches(self.settings.batch, np.random.default_rng(0)):
            wanted = torch.from_numpy(targets[rows]).to(self.device)
            losses = phrase_losses(self._outputs(self.aside_inputs, rows), self.weights, wanted, half=self.half)
            total += float(losses.positions) * len(rows)
        return total / len(self.aside)

    @torch.no_grad()
    def _shortlist(self) -> tuple[Tensor, Tensor, ShortlistSize, float]:
        size = self.settings.shortlist or ShortlistSize.of(len(self.questions), len(self.tokenizer))
        x0 = torch.empty(len(self.questions), self.weights.shape[1])
        for rows in self.inputs.batches(self.settings.batch, np.random.default_rng(0)):
            x0[rows] = self._outputs(self.inputs, rows)[:, 0].cpu()
        wanted = _real(drawn_targets(self.questions, self.identifiers, self.rng))
        self.progress("shortlist", 0, 1, math.nan)
        with torch.enable_grad():
            fixed = self.weights.detach()
            centers, sets = fit_shortlist(x0.to(self.device), wanted, fixed, size, half=self.half, seed=self.seed)
        self.progress("shortlist", 1, 1, math.nan)
        some = np.random.default_rng(self.seed).permutation(len(x0))[:1000]
        coverage = covered(x0[some].to(self.device), [wanted[row] for row in some], centers, sets, size.joined)
        return centers, sets, size, coverage

    @torch.no_grad()
    def _first_weights(self) -> Tensor:
        """Return rows (V, D): the token's log frequency along the mean output, plus small noise."""
        counts = torch.ones(len(self.tokenizer))
        drawn = torch.from_numpy(drawn_targets(self.questions, self.identifiers, np.random.default_rng(self.seed)))
        counts += torch.bincount(drawn.flatten(), minlength=len(counts))
        rows = np.arange(min(len(self.questions), self.settings.batch), dtype=np.int64)
        mean = self._outputs(self.inputs, rows).flatten(0, 1).mean(dim=0).cpu()
        noise = torch.randn(len(counts), len(mean)) * _SMALL_NOISE
        noise -= torch.outer(noise @ mean, mean) / mean.square().sum()
        frequent = torch.outer(torch.log(counts / counts.sum()), mean) / mean.square().sum()
        return (frequent + noise).to(self.device)

    def _state(self) -> tuple[dict[str, Tensor], Tensor]:
        return copy.deepcopy(self.encoder.state_dict()), self.weights.detach().clone()


def _real(targets: npt.NDArray[np.int64]) -> list[list[int]]:
    return [[token for token in row if token != PAD] for row in targets.tolist()]
