"""What people look at: the catalogue and what is stored of a user. No answer passes through here."""
