"""Which items of the tasks are in the training documents, and scores without them."""
