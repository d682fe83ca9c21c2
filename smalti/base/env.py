"""The only reader of environment variables outside ``cli/``. torchrun's names are honoured, never renamed."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """This process's place among the ranks of one attempt; a world of one when nothing is set."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    attempt: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @property
    def is_first(self) -> bool:
        """True on rank 0, which alone writes run-wide files."""
        return self.rank == 0


def inside_world() -> bool:
    """True when somebody (our agent, torchrun, srun) has already started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world() -> World:
    """Read the place of this process from torchrun's variables."""
    if not inside_world():
        return World()
    get = os.environ.get
    size = int(os.environ["WORLD_SIZE"])
    return World(
        rank=int(os.environ["RANK"]),
        local_rank=int(get("LOCAL_RANK", os.environ["RANK"])),
        world_size=size,
        local_world_size=int(get("LOCAL_WORLD_SIZE", str(size))),
        attempt=int(get("SMALTI_ATTEMPT", get("TORCHELASTIC_RESTART_COUNT", "0"))),
        master_addr=get("MASTER_ADDR", "127.0.0.1"),
        master_port=int(get("MASTER_PORT", "0")),
    )


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """A copy of this environment with ``extra`` laid over it, for starting a child process."""
    return {**os.environ, **extra}


def plain_output() -> bool:
    """True when live, rewriting output must not be used (CI, TERM=dumb)."""
    return bool(os.environ.get("CI")) or os.environ.get("TERM") == "dumb"


def log_level() -> str:
    """Level for the log lines on stderr (``SMALTI_LOG_LEVEL``, default INFO)."""
    return os.environ.get("SMALTI_LOG_LEVEL", "INFO").upper()


def user_folder() -> str:
    """Where user-wide files may lie (``SMALTI_HOME``, default ``~/.smalti``)."""
    return os.environ.get("SMALTI_HOME", os.path.join(os.path.expanduser("~"), ".smalti"))
