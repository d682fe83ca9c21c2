"""A quality classifier of documents: linear on hashed n-grams, trained on good and bad ones."""
