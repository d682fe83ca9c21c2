"""Memory of serving a model by format of its weights, and the devices that hold it."""
