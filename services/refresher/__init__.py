"""The refresher process: folds attributions into refreshed item states (PEFA)."""
