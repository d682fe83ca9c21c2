"""The file of clusters: where ``smalti fleet launch --on NAME`` runs."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from smalti.config.schema import Config, Count, NotAllowed, Real, placement

Engine = Literal["local", "slurm", "ssh"]

Option = Annotated[str, Field(pattern=r"^-")]
Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@-]{0,252}$")]


class ClusterConfig(Config):
    """A cluster. Its engine starts the runs: this machine's queue, Slurm's ``srun``, or ssh."""

    engine: Engine = placement("local")
    """local: this machine. slurm: ``srun``, on the machine of the queue, submits each run as a job. ssh: each run is
    started on one of ``hosts``."""
    options: tuple[Option, ...] = placement(())
    """Arguments of ``srun``, such as ``--partition=gpu``, or of ``ssh``, such as ``-oPort=2222``; no shell reads
    them."""
    hosts: tuple[Host, ...] = placement(())
    """Of ssh: the hosts, by the names that they have themselves (``hostname``)."""
    cores_per_host: Count | None = placement(None)
    """Of ssh: cores of each host, which runs on the CPU share."""
    gpus_per_host: Count | None = placement(None)
    """Of ssh: GPUs of each host."""
    ranks_per_node: Count | None = placement(None)
    """Ranks of a node. More are a task of Slurm each; up to so many are started by one task on one node, which
    restarts them after a fault. Absent: all are on one node."""
    usd_per_device_hour: Real | None = placement(None, ge=0)
    """Price of a GPU, or of a core for runs on the CPU, in dollars for an hour; ``smalti fleet report`` sums it up."""

    @model_validator(mode="after")
    def _fields_are_of_the_engine(self) -> Self:
        of_engines = {"options": ("slurm", "ssh"), "ranks_per_node": ("slurm",)}
        of_engines |= dict.fromkeys(("hosts", "cores_per_host", "gpus_per_host"), ("ssh",))
        for name, engines in of_engines.items():
            if getattr(self, name) and self.engine not in engines:
                raise NotAllowed(
                    f"{name} has no effect with engine: {self.engine}",
                    allowed=f"with engine: {' or '.join(engines)}",
                    hint=f"leave {name} out",
                )
        if self.engine == "ssh" and not (self.hosts and (self.cores_per_host or self.gpus_per_host)):
            raise NotAllowed(
                "engine: ssh without hosts, or without what they have",
                allowed="hosts, and cores_per_host or gpus_per_host",
                hint="{engine: ssh, hosts: [n1, n2], gpus_per_host: 8}",
            )
        return self


class ClustersConfig(Config):
    """All clusters by name; ``local`` exists also where it is not listed."""

    clusters: dict[str, ClusterConfig] = placement({})
    """The clusters."""
