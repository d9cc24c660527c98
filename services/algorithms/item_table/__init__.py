"""A catalogue's items as columns that processes share: ids, titles, categories. No Python object an item."""
