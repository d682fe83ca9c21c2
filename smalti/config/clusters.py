"""The file of clusters: where ``smalti fleet launch --on NAME`` runs."""

from typing import Annotated, Literal

from pydantic import Field

from smalti.config.schema import Config, Count, Real, placement

Engine = Literal["local", "slurm"]

Option = Annotated[str, Field(pattern=r"^-")]


class ClusterConfig(Config):
    """A cluster. Its engine starts the runs: this machine's queue, or Slurm's ``srun``."""

    engine: Engine = placement("local")
    """local: this machine. slurm: ``srun``, on the machine of the queue, submits each run as a job."""
    options: tuple[Option, ...] = placement(())
    """Arguments of ``srun``, such as ``--partition=gpu`` and ``--account=lab``; no shell reads them."""
    ranks_per_node: Count | None = placement(None)
    """Ranks of a node. More are a task of Slurm each; up to so many are started by one task on one node, which
    restarts them after a fault. Absent: all are on one node."""
    usd_per_device_hour: Real | None = placement(None, ge=0)
    """Price of a GPU, or of a core for runs on the CPU, in dollars for an hour; ``smalti fleet report`` sums it up."""


class ClustersConfig(Config):
    """All clusters by name; ``local`` exists also where it is not listed."""

    clusters: dict[str, ClusterConfig] = placement({})
    """The clusters."""
