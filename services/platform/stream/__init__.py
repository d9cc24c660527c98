"""Shared by all readers and writers of topics: positions, times, records, reading, following.

It knows no topic's content and no process.
"""
