"""Jobs over whole topics, run by commands: past interactions in, another model's attributions, a fold from zero."""
