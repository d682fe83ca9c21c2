"""The ``track:`` section: where metrics go."""

from smalti.config.schema import Config, Whole, placement


class TrackConfig(Config):
    """Where metrics go; the run folder's JSONL files are always written."""

    console: bool = placement(True)
    """A live line on a terminal, plain lines elsewhere."""
    console_every_s: Whole = placement(10, ge=0)
    """Seconds between plain lines when stderr is not a terminal."""
