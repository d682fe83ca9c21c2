"""The value of data: the loss curves of one model trained on versions of a set."""
