"""``smalti data build``: one recipe from raw documents to clean ones, in content-addressed steps."""
