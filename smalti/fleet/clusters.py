"""The clusters by name: those of ``clusters.yaml`` in ``SMALTI_HOME``, and ``local``."""

from pathlib import Path

from smalti.base.env import user_folder
from smalti.base.errors import UserError
from smalti.config.clusters import ClusterConfig, ClustersConfig
from smalti.config.load import load_text


def clusters_file() -> Path:
    """Return the default file of clusters, which may not exist."""
    return Path(user_folder()) / "clusters.yaml"


def clusters(file: str | None = None) -> dict[str, ClusterConfig]:
    """Return the clusters of the default file, or of another one, which must exist."""
    path = Path(file or clusters_file())
    if file is not None and not path.is_file():
        raise UserError(f"--clusters {file} does not exist", hint="docs/guides/launch.md shows such a file")
    listed = {"local": ClusterConfig()}
    if path.is_file():
        listed |= load_text(ClustersConfig, path.read_text(encoding="utf-8"), str(path)).config.clusters
    return listed
