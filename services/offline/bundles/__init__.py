"""Writing of bundles, which serving only reads: `services.algorithms.bundles` has their formats."""
