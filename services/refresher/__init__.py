"""The refresher process: folds attributions into item states (PEFA)."""
