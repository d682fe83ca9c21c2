"""Raw documents -> clean, unique documents, with every drop recorded. Daft is used in ``plan`` and nowhere else."""
