"""The ranks: start, agree, notice that one is lost."""
