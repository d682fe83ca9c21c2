"""What an answer is worth, and how sure that is."""
