"""Top-K from small integer codes in cells."""
