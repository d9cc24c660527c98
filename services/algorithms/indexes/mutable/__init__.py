"""An index that changes while it answers: versions, a delta beside the main structure, merges, snapshots."""
