"""Jobs that read or write whole topics: import, attribution with another model, and a rebuild from offset zero."""
