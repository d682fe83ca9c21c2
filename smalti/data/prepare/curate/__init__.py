"""Raw documents -> normalised, filtered, unique documents, with every drop recorded. Only ``queries`` uses Daft."""
