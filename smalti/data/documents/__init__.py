"""Raw documents: finding files, reading their formats, writing tables of documents."""
