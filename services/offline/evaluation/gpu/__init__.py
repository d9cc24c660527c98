"""The papers' Table 5 on a GPU."""
