"""The refresher process: attributions in, refreshed item states out (PEFA)."""
