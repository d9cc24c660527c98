"""A catalogue's items as columns shared by processes. No Python object per item."""
