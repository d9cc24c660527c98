"""One recipe per kind of part: how it gets onto this machine, how it is started, when it is ready, what it is."""
