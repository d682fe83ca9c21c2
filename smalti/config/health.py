"""The section ``train.health``: a check of the nodes, after faults that may be theirs and when training is slow."""

from typing import Annotated

from pydantic import Field

from smalti.config.schema import Config, Real, WallTime, placement


class HealthConfig(Config):
    """A command that checks this node before an attempt on it follows; with ``train.nodes`` it runs on all nodes of the
    attempt at once, which may measure each other. Only ``smalti train`` that starts the ranks itself runs it."""

    command: Annotated[str, Field(min_length=1)] = placement(...)
    """A command line, run by ``sh`` while no rank runs. Exit code 0: the node is healthy; 3: it is not, and the run
    ends with exit code 75, or continues without the node if that has joined. Any other code, or no end in time, decides
    nothing: the run continues."""
    timeout: WallTime = placement("5min")
    """After this time the check is killed."""
    mfu_below: Real | None = placement(None, gt=0, lt=1)
    """Save, stop and check also when MFU stays below this share of its trailing median. Absent: only after a fault."""
