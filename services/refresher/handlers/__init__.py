"""Handlers of the refresher: fold records, publish changes, describe the state."""
