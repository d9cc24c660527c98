"""Write bundles; `services.algorithms.bundles` has their formats."""
