"""What all readers and writers of topics share; it knows no topic's content."""
