"""The base class that mosaicml-streaming's image data sets name."""


class VisionDataset:
    """Does nothing."""
