"""An index that changes while it answers: versions, a delta, merges, snapshots."""
