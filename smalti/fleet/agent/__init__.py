"""The parent of a node's ranks: starts them, waits, and ends an attempt as soon as one of them is dead.

Guarantees: no rank outlives the agent. A dead rank ends the attempt within ``grace_s`` and a few seconds, and the cause
is named. SIGTERM and the first Ctrl-C are forwarded, so that the ranks save; the second Ctrl-C kills at once.
"""

from smalti.fleet.agent.attempts import run
from smalti.fleet.agent.outcome import Outcome, announce

__all__ = ["Outcome", "announce", "run"]
