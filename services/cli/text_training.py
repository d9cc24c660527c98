"""The training package as `freshet bench text` needs it: evaluation and training do not know each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.algorithms.generation.generator import Generator
from services.algorithms.states import FloatArray
from services.offline.evaluation.text.trained import FineTune, Pairs, Training, Tuned
from services.offline.training.phrases import fit as phrases
from services.offline.training.phrases.identifiers import TargetTokenizer
from services.offline.training.text_mol import TextMolSettings, train_text_mol
from services.offline.training.text_mol.fit import Prepared


@dataclass(frozen=True, slots=True)
class AskedPhrases:
    """A trained phrase model as the rows ask it."""

    model: phrases.TrainedPhrases

    @property
    def report(self) -> dict[str, Any]:
        return self.model.report

    @property
    def sequences(self) -> Sequence[Sequence[int]]:
        return self.model.identifiers.tokens

    @property
    def nbytes(self) -> int:
        """Half-precision weights, centers and sets."""
        return self.model.weights.size * 2 + self.model.centers.nbytes + self.model.sets.nbytes

    def encode(self, texts: Sequence[str]) -> FloatArray:
        return self.model.encode(texts)

    def generator(self) -> Generator:
        return self.model.generator()


def as_users_have_it() -> Training:
    """Both trainings with their defaults but for steps, epochs and seed."""
    return Training(fine_tuning=_fine_tuning, phrases=_train_phrases)


def _fine_tuning(pairs: Pairs, documents: Sequence[str]) -> FineTune:
    prepared = Prepared(pairs, documents, TextMolSettings())

    def fine_tune(*, kind: str, steps: int, mutual_information: float, seed: int) -> Tuned:
        settings = TextMolSettings(kind=kind, steps=steps, mutual_information_weight=mutual_information)
        return train_text_mol(pairs, documents, settings, seed, prepared=prepared)

    return fine_tune


def _train_phrases(
    pairs: Pairs,
    identifiers: Sequence[Sequence[str]],
    tokenizer: TargetTokenizer,
    *,
    epochs: int,
    least_steps: int,
    seed: int,
) -> AskedPhrases:
    settings = phrases.PhraseSettings(epochs=epochs, least_steps=least_steps)
    return AskedPhrases(phrases.train_phrases(pairs, identifiers, tokenizer, settings, seed))
