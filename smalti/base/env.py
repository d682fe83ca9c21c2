"""Reads and sets environment variables: the only module outside ``cli/`` that does.

torchrun's and Slurm's variables are used under their own names.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from smalti.base import slurm
from smalti.base.errors import UserError
from smalti.base.slurm import int_variable


@dataclass(frozen=True)
class World:
    """This process's rank in an attempt; a world of one rank where nothing is set."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    attempt: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: str = "nobody"
    """Who started this process as a rank: ``smalti train`` (our agent), ``torchrun``, ``srun``, or ``a launcher``."""
    store_is_up: bool = False
    """True if the launcher runs the rendezvous store at that address, False if rank 0 does."""

    @property
    def is_first(self) -> bool:
        """True on rank 0, which alone writes run-wide files."""
        return self.rank == 0


def inside_world() -> bool:
    """Return whether a launcher (Smalti's agent, torchrun, srun) has started this process as a rank.

    A single task of srun is no rank: there ``smalti train`` starts the ranks of its node itself.
    """
    return ("RANK" in os.environ and "WORLD_SIZE" in os.environ) or slurm.task_count(os.environ) > 1


def world() -> World:
    """Return the rank of this process from torchrun's variables; where they are not set, from Slurm's."""
    if not inside_world():
        return World()
    variables = os.environ
    by_slurm = "RANK" not in variables or "WORLD_SIZE" not in variables
    names = ("SLURM_PROCID", "the tasks of the step") if by_slurm else ("RANK", "WORLD_SIZE")
    rank = int_variable(variables, names[0], 0)
    size = slurm.task_count(variables) if by_slurm else int_variable(variables, "WORLD_SIZE", 1)
    if not 0 <= rank < size:
        raise UserError(f"{names[0]}={rank} is not a rank of {names[1]}={size}", allowed=f"0 to {size - 1}")
    if by_slurm:
        return World(
            rank=rank,
            local_rank=int_variable(variables, "SLURM_LOCALID", rank),
            world_size=size,
            local_world_size=slurm.tasks_here(variables),
            attempt=int_variable(variables, "SLURM_RESTART_COUNT", 0),
            master_addr=variables.get("MASTER_ADDR") or slurm.address(variables),
            master_port=int_variable(variables, "MASTER_PORT", slurm.port(variables)),
            launcher="srun",
        )
    return World(
        rank=rank,
        local_rank=int_variable(variables, "LOCAL_RANK", rank),
        world_size=size,
        local_world_size=int_variable(variables, "LOCAL_WORLD_SIZE", size),
        attempt=int_variable(variables, "SMALTI_ATTEMPT", int_variable(variables, "TORCHELASTIC_RESTART_COUNT", 0)),
        master_addr=variables.get("MASTER_ADDR", "127.0.0.1"),
        master_port=int_variable(variables, "MASTER_PORT", 0),
        launcher=_launcher(),
        store_is_up=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _launcher() -> str:
    if attempt_is_open():
        return "smalti train"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "a launcher"


def nodes_left_out() -> int:
    """Return the number of nodes of a Slurm allocation that are unused because srun has not started this process."""
    return 0 if inside_world() else slurm.nodes_left_out(os.environ)


def gloo_interface() -> str | None:
    """Return gloo's network interface (``GLOO_SOCKET_IFNAME``); None where it is not set."""
    return os.environ.get("GLOO_SOCKET_IFNAME")


def set_gloo_interface(name: str) -> None:
    """Set gloo's network interface; keeps the user's setting."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def grow_gpu_segments() -> None:
    """Enable expandable segments in torch's CUDA allocator, against fragmentation; keeps the user's setting."""
    if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):  # two names of one
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Return a copy of this environment updated with ``extra``, for a child process."""
    return {**os.environ, **extra}


def variables_of(names: Iterable[str]) -> dict[str, str]:
    """Return those of the named variables that are set and not empty."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def quiet_daft() -> None:
    """Set the variables that Daft reads at import and has no other switch for; keeps the user's settings.

    Without them Daft sends telemetry, draws its own progress bars and prints a query id.
    """
    for name, value in (("DO_NOT_TRACK", "1"), ("DAFT_PROGRESS_BAR", "0"), ("DAFT_SHOW_QUERY_ID", "0")):
        os.environ.setdefault(name, value)


def plain_output() -> bool:
    """Return whether output must not be rewritten in place (CI, TERM=dumb)."""
    return bool(os.environ.get("CI")) or os.environ.get("TERM") == "dumb"


def no_color() -> bool:
    """Return whether output must have no colour (``NO_COLOR`` set and not empty; https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def log_level() -> str:
    """Return the level of the log (``SMALTI_LOG_LEVEL``, default INFO)."""
    return os.environ.get("SMALTI_LOG_LEVEL", "INFO").upper()


def serve_key() -> str | None:
    """Return the key that ``smalti serve`` requires (``SMALTI_SERVE_KEY``); None where it is not set."""
    return os.environ.get("SMALTI_SERVE_KEY") or None


_STORE_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True)
class StoreSettings:
    """The variables of stores that Smalti itself reads; obstore reads the others (``AWS_...``)."""

    hub_endpoint: str
    hub_token: str | None = field(repr=False)
    s3_endpoint: str | None
    s3_variable: str | None
    """``VARIABLE=endpoint`` of the variable that sets another S3 endpoint than Amazon's, for messages (a login in it is
    ``***``); None where none is set."""
    s3_credentials_file: str | None
    """File with the keys of S3 that is read again before each request (``SMALTI_S3_CREDENTIALS``); None: not set."""
    signature: tuple[str | None, ...] = field(repr=False)
    """The variables that obstore reads, with values: another value needs another connection."""


def drop_empty_store_variables() -> None:
    """Remove the empty variables of stores, because obstore panics on an empty endpoint."""
    for name in [name for name in os.environ if name.startswith(_STORE_PREFIXES) and not os.environ[name].strip()]:
        del os.environ[name]


def store_settings() -> StoreSettings:
    """Return the endpoint and token of the Hugging Face Hub (``HF_ENDPOINT``; ``HF_TOKEN``, or the token that its login
    has saved), and the variables of other stores. An empty variable counts as not set.
    """
    token = os.environ.get("HF_TOKEN") or None
    if token is None:
        home = os.environ.get("HF_HOME", os.path.join(os.path.expanduser("~"), ".cache", "huggingface"))
        with suppress(OSError), open(os.path.join(home, "token"), encoding="utf-8") as file:
            token = file.read().strip() or None
    names = sorted(name for name in os.environ if name.startswith(_STORE_PREFIXES) and os.environ[name].strip())
    endpoint_setting = next((f"{name}={os.environ[name]}" for name in _S3_ENDPOINTS if name in names), None)
    return StoreSettings(
        hub_endpoint=(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
        hub_token=token,
        s3_endpoint=os.environ.get("AWS_ENDPOINT_URL_S3") or None,
        s3_variable=endpoint_setting and re.sub(r"://[^/\s]*@", "://***@", endpoint_setting),
        s3_credentials_file=os.environ.get("SMALTI_S3_CREDENTIALS") or None,
        signature=tuple(f"{name}={os.environ[name]}" for name in names),
    )


def s3_credentials(file: str) -> tuple[str, str, str | None]:
    """Return key, secret and session token of a file as ``aws configure export-credentials --format env`` prints it."""
    try:
        with open(file, encoding="utf-8") as lines:
            pairs = [line.strip().removeprefix("export ").partition("=") for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"SMALTI_S3_CREDENTIALS={file} cannot be read: {error}") from error
    values = {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}
    key, secret = (values.get(name) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    if not key or not secret:
        raise UserError(
            f"SMALTI_S3_CREDENTIALS={file} lacks AWS_ACCESS_KEY_ID=... or AWS_SECRET_ACCESS_KEY=...",
            hint=f"aws configure export-credentials --format env > {file}.new && mv {file}.new {file}",
        )
    return key, secret, values.get("AWS_SESSION_TOKEN") or None


def store_keys(prefix: str) -> tuple[str, str]:
    """Return the keys of a second S3 store: ``PREFIX_ACCESS_KEY_ID`` and ``PREFIX_SECRET_ACCESS_KEY``."""
    names = (f"{prefix}_ACCESS_KEY_ID", f"{prefix}_SECRET_ACCESS_KEY")
    for name in names:
        if not os.environ.get(name):
            raise UserError(f"keys={prefix} in a URL needs the environment variable {name}", hint=f"export {name}=...")
    return os.environ[names[0]], os.environ[names[1]]


def user_folder() -> str:
    """Return the folder of user-wide files (``SMALTI_HOME``, default ``~/.smalti``)."""
    return os.environ.get("SMALTI_HOME") or os.path.join(os.path.expanduser("~"), ".smalti")


def attempt_is_open() -> bool:
    """Return whether Smalti's agent started this rank, and so has opened the run folder and counted the attempt."""
    return "SMALTI_ATTEMPT" in os.environ


def peer_memory() -> str | None:
    """Return the folder of shared memory of Smalti's agent (``SMALTI_PEER_MEMORY``); None where it has none."""
    return os.environ.get("SMALTI_PEER_MEMORY") or None


def peer_key() -> str | None:
    """Return the key that agents of several nodes share (``SMALTI_PEER_KEY``); None where it is not set."""
    return os.environ.get("SMALTI_PEER_KEY") or None


def rank_nonce() -> str | None:
    """Return the random name that the agent gave to this rank (``SMALTI_RANK_NONCE``); None without an agent."""
    return os.environ.get("SMALTI_RANK_NONCE") or None


def fleet_attempt() -> str | None:
    """Return the nonce of the fleet's attempt that this process belongs to (``SMALTI_FLEET_ATTEMPT``)."""
    return os.environ.get("SMALTI_FLEET_ATTEMPT") or None


def fleet_queued_s() -> float:
    """Return how long this run has waited in the queue, in seconds (``SMALTI_FLEET_QUEUED_S``); 0 without a queue."""
    text = os.environ.get("SMALTI_FLEET_QUEUED_S") or "0"
    try:
        return max(0.0, float(text))
    except ValueError:
        raise UserError(f"SMALTI_FLEET_QUEUED_S={text} is no number of seconds", hint="unset it") from None


def any_process_with(name: str, value: str) -> bool:
    """Return whether a process of this user was started with an environment variable of this value, and still runs."""
    import psutil  # a tenth of the time that 'smalti --help' may take

    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def visible_gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs that this process may use: those of ``CUDA_VISIBLE_DEVICES``, where it is
    set, else the numbers of all of this machine."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    try:
        return [str(number) for number in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    except OSError:
        return []


_TRACKER_NAMES = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_ID",
    "WANDB_PROJECT",
    "WANDB_ENTITY",
    "WANDB_MODE",
    "WANDB_RUN_ID",
    "WANDB_DIR",
)


def tracker_settings() -> dict[str, str]:
    """Return the variables of MLflow and Weights & Biases that Smalti reads and that are set.

    Keys and passwords are not among them: the clients read those themselves.
    """
    return {name: os.environ[name] for name in _TRACKER_NAMES if os.environ.get(name)}


def quiet_trackers() -> None:
    """Set the variables that the trackers' clients have no other switch for; keeps the user's settings.

    Without them they send telemetry, and retry a request to an unreachable server for minutes.
    """
    for name, value in (
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"),
        ("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false"),
        ("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true"),
        ("WANDB_ERROR_REPORTING", "false"),
    ):
        os.environ.setdefault(name, value)
