"""The goodput ledger of a run: which share of the time of its ranks went where, computed from the run folder alone."""

from smalti.track.goodput.history import Attempt, Fault, History, read_history
from smalti.track.goodput.ledger import BUCKETS, Interruption, Ledger, ledger

__all__ = ["BUCKETS", "Attempt", "Fault", "History", "Interruption", "Ledger", "ledger", "read_history"]
