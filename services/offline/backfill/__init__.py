"""Jobs over whole topics, run by commands: import past interactions, attribute with another model, fold from zero."""
