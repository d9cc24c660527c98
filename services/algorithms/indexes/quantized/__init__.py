"""Top-K from small integer codes in cells: plain dot products alone, and the first stages of a Mixture of Logits."""
