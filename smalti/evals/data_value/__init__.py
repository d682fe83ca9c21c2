"""The value of data: the loss curves of one model trained on two versions of a set."""
