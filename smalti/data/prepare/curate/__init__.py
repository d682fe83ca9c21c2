"""Raw documents -> normalised, filtered, unique documents, with every drop recorded. Only ``plan`` uses Daft."""
