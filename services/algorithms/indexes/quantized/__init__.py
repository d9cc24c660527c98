"""Top-K from small integer codes in cells: plain dot products, and first stages of a Mixture of Logits."""
