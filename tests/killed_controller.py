"""The fleet's controller, which kills itself (SIGKILL): ``python killed_controller.py lines|commits COUNT CORES``.

At the COUNT-th line that it executes of its own code and of the database's; or at the COUNT-th instant around a commit:
before the transaction, in it, before COMMIT, after it.
"""

import os
import signal
import sys
from types import FrameType
from typing import Any

from smalti.fleet.controller import __main__ as controller
from smalti.fleet.queue.schedule import Room

KIND, LEFT, CORES = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
left = LEFT


def trace(frame: FrameType, event: str, argument: Any) -> Any:
    file = frame.f_code.co_filename
    if KIND == "commits":
        is_write = frame.f_code.co_name == "_committed" and frame.f_locals["begin"] == "BEGIN IMMEDIATE"
        return count if is_write else None
    return count if "/smalti/fleet/" in file or file.endswith("/base/database.py") else None


def count(frame: FrameType, event: str, argument: Any) -> Any:
    global left
    if event in ("line", "return"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return count


controller.this_room = lambda: Room(cores=CORES)
sys.settrace(trace)
sys.exit(controller.main())
