"""The section ``train.nodes``: the machines of a run whose ranks Smalti's agents start."""

import re
from typing import Annotated

from pydantic import AfterValidator

from smalti.config.schema import Config, NotAllowed, WallTime, Whole, placement

ALLOWED = "HOST:PORT, a name or IPv4 address, and a port of 1 to 65535"


def is_address(text: str) -> bool:
    """Return whether other nodes may reach a lead at ``text``."""
    host, _, port = text.rpartition(":")
    return re.fullmatch(r"[^:\s]+:[1-9]\d{0,4}", text) is not None and host != "0.0.0.0" and int(port) < 1 << 16


def _check_address(text: str) -> str:
    if not is_address(text):
        raise NotAllowed(
            f"'{text}' is not an address at which other nodes reach this one",
            allowed=ALLOWED,
            hint="train.nodes.listen=10.0.0.1:7400",
        )
    return text


class NodesConfig(Config):
    """Several machines, each with an agent: this command on one, which decides, and ``smalti fleet join`` on the
    others. All must see the run folder, recipe and data under the same paths."""

    count: Whole = placement(..., ge=2)
    """Nodes that the ranks are divided over in equal parts. More may join: they are spares."""
    listen: Annotated[str, AfterValidator(_check_address)] = placement(...)
    """HOST:PORT of this node: where the others join, and HOST is where all ranks reach rank 0. ``smalti fleet launch``
    on hosts of ssh sets it."""
    lease: WallTime = placement("10s")
    """A node that is silent for so long is lost, and ends its ranks by itself."""
    wait: WallTime = placement("10min")
    """How long to wait for nodes to join, at the start and after one was lost; then the command ends with 75."""
