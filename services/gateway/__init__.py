"""The API gateway, the only process that clients call: recommendations, searches, interactions."""
