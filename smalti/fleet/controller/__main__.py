"""``python -m smalti.fleet.controller``: the controller of this machine, until all of its runs have ended."""

import sys

from smalti.base.env import visible_gpus
from smalti.base.errors import ExitCode
from smalti.base.log import get, setup
from smalti.base.machine import cpu_count
from smalti.fleet.controller.lease import Lease
from smalti.fleet.controller.loop import Controller
from smalti.fleet.queue.runs import this_host
from smalti.fleet.queue.schedule import Room


def main() -> int:
    """Control the runs; returns at once if another process does."""
    setup("INFO")
    lease = Lease.take(this_host())
    if lease is None:
        get("fleet").info("another controller of %s runs", this_host())
        return ExitCode.DONE
    Controller(lease, this_room()).run()
    return ExitCode.DONE


def this_room() -> Room:
    """Return the cores and GPUs of this machine."""
    return Room(cpu_count(), len(visible_gpus()))


if __name__ == "__main__":
    sys.exit(main())
