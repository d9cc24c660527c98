"""A catalogue's items as columns shared by processes: ids, titles, categories. No Python object per item."""
