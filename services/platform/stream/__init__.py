"""What every reader and writer of a topic shares: positions, times, records, retraction, reading, following.

It knows no topic's content and no process.
"""
