"""Fine-tune a text encoder as text MoL, and as a mean-pooled dot product at the same budget."""

from services.offline.training.text_mol.fit import TextFit, TextMolSettings, train_text_mol

__all__ = ["TextFit", "TextMolSettings", "train_text_mol"]
