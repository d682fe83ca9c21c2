"""The memory of a model that answers, by format of its weights, and the devices that hold it."""
