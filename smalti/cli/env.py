"""``smalti env``: what a bug report needs to say about this installation and this machine, without secrets."""

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from smalti.cli.options import Json

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_STORAGE = {
    **dict.fromkeys(("s3", "gs", "az", "http", "hf"), ("obstore", "obstore")),
    "hdfs": ("pyarrow", "pyarrow"),
}
"""Protocol -> (module that it needs, package to install)."""

_LISTED = re.compile(
    r"(?:SMALTI|OMP|MKL|KMP|GOMP|NCCL|TORCH|TORCHELASTIC|TORCHINDUCTOR|PYTORCH|CUDA|CUBLAS|GLOO|HIP|HSA|ROCR|MIOPEN|SLURM|"
    r"RAY|DAFT|HF|TRANSFORMERS|TOKENIZERS|MLFLOW|WANDB|TENSORBOARD|AWS|GOOGLE|AZURE|OPENAI|FSSPEC|PYTHON|PYTEST|LD|CONDA|"
    r"VIRTUAL|KUBERNETES)_?[A-Z0-9_]*|(?:LOCAL_)?(?:RANK|WORLD_SIZE)|GROUP_RANK|MASTER_(?:ADDR|PORT)|CI|TERM|NO_COLOR|"
    r"COLUMNS|TMPDIR|LANG|LC_ALL|DO_NOT_TRACK|(?:HTTPS?|NO|ALL)_PROXY"
)
_HARMLESS = re.compile(
    r"(?:OMP|MKL|KMP|GOMP|NCCL|TORCH|TORCHINDUCTOR|PYTORCH|CUDA|CUBLAS|GLOO|HIP|HSA|ROCR|MIOPEN|DAFT)_[A-Z0-9_]*|"
    r"SMALTI_(?:LOG_LEVEL|ATTEMPT|DEBUG)|SLURM_(?:NTASKS|NNODES|JOB_NUM_NODES|PROCID|LOCALID|NODEID|CPUS_[A-Z_]*|GPUS_[A-Z_]*)|"
    r"(?:LOCAL_)?(?:RANK|WORLD_SIZE)|GROUP_RANK|MASTER_PORT|TORCHELASTIC_RESTART_COUNT|HF_HUB_OFFLINE|TOKENIZERS_PARALLELISM|"
    r"WANDB_MODE|CI|TERM|NO_COLOR|COLUMNS|LANG|LC_ALL|DO_NOT_TRACK|PYTHON(?:HASHSEED|UNBUFFERED|WARNINGS|DONTWRITEBYTECODE)"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|USER|LOGIN|ADDR|HOST|URL|URI", re.IGNORECASE)
_PLAIN = re.compile(r"[A-Za-z0-9_.,:;=+ -]{0,80}")


@app.command(epilog="Example: smalti env --no-torch")
def env(
    no_torch: Annotated[
        bool,
        typer.Option("--no-torch", help="Leave out PyTorch, which takes two seconds to load."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print versions, machine, devices, packages and settings, to paste into a bug report.

    Environment variables are listed by name, with values only where they cannot be secret; the home folder is ~.
    """
    from smalti.base.machine import without_home
    from smalti.cli.tables import print_json

    facts = without_home(gather(torch=not no_torch))
    if as_json:
        print_json(facts)
        return
    print(text(facts))


def gather(*, torch: bool) -> dict[str, Any]:
    """Return all facts as JSON values."""
    import platform
    import sys

    import smalti
    from smalti.base.env import inside_world
    from smalti.fleet import machine
    from smalti.track.packages import requirements, version_of
    from smalti.track.provenance import git_state

    package = os.path.dirname(os.path.abspath(smalti.__file__))
    return {
        "smalti": {"version": smalti.__version__, "git": git_state(Path(package)), "folder": package},
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
            "virtual_environment": sys.prefix != sys.base_prefix,
        },
        "platform": platform.platform(),
        "cpu": machine.cpu(),
        "memory": machine.memory(),
        "disks": machine.disks(),
        "gpus": _known(machine.gpus()),
        "torch": _torch() if torch else None,
        "packages": {
            extra: {package_.name: {"version": package_.version, "problem": package_.problem} for package_ in listed}
            for extra, listed in requirements().items()
            if extra not in ("all", "demo")  # combinations of others
        },
        "storage": {
            "file": "fsspec " + (version_of("fsspec") or "?"),
            **{
                name: version_of(package) if find_spec(module) else None for name, (module, package) in _STORAGE.items()
            },
        },
        "tools": machine.tools(),
        "slurm_job": "SLURM_JOB_ID" in os.environ,
        "ray": {"version": version_of("ray"), "inside_cluster": "RAY_ADDRESS" in os.environ},
        "inside_launcher": inside_world(),
        "environment": variables(os.environ),
    }


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return name -> value of the variables that may matter; ``(set)`` where the value might be secret."""
    values = {}
    for name in sorted(environment):
        if _LISTED.fullmatch(name):
            value = environment[name]
            harmless = _HARMLESS.fullmatch(name) and not _SECRET.search(name) and _PLAIN.fullmatch(value)
            values[name] = value if harmless else "(set)"
    return values


def text(facts: dict[str, Any]) -> str:
    """Return all facts as text, one per line."""
    from smalti.cli.tables import pairs

    blocks = [
        _installation(facts),
        _machine(facts),
        _torch_lines(facts["torch"]),
        _packages(facts["packages"]),
        _surroundings(facts),
        [(name, value) for name, value in facts["environment"].items()],
    ]
    return "\n\n".join(pairs(block) for block in blocks if block)


def _torch() -> dict[str, Any]:
    from smalti.base.errors import SmaltiError
    from smalti.fleet.measure import torch_facts

    try:
        return torch_facts()
    except SmaltiError as error:  # a broken installation belongs in the report
        return {"problem": str(error)}


def _installation(facts: dict[str, Any]) -> list[tuple[str, str]]:
    git, python = facts["smalti"]["git"], facts["python"]
    commit = f", commit {git['commit']}{' with changes' if git['dirty'] else ''}" if git else ""
    kind = ", virtual environment" if python["virtual_environment"] else ""
    return [
        ("smalti", f"{facts['smalti']['version']}{commit}"),
        ("installed in", facts["smalti"]["folder"]),
        ("python", f"{python['version']} ({python['implementation']}{kind})"),
        ("platform", facts["platform"]),
    ]


def _known(gpus: dict[str, Any]) -> dict[str, Any]:
    """Add the device of ``smalti plan hardware`` to each GPU; None: unknown, or a MIG slice."""
    from smalti.config.hardware import hardware_of_driver

    for gpu in gpus["devices"]:
        known = None if gpu["mig"] else hardware_of_driver(gpu["name"])
        gpu["known_as"] = known.name if known else None
    return gpus


def _machine(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from smalti.base.units import format_bytes

    cpu, memory = facts["cpu"], facts["memory"]
    quota = f", quota of {cpu['quota_cpus']:.3g} CPUs" if cpu["quota_cpus"] is not None else ""
    limit = memory["cgroup_limit_bytes"]
    lines = [
        ("cpu", f"{cpu['name']}; {cpu['usable']} of {cpu['threads']} threads usable, {cpu['cores']} cores{quota}"),
        ("cpu features", ", ".join(cpu["features"]) or "-"),
        ("memory", f"{format_bytes(memory['total_bytes'])}, {format_bytes(memory['available_bytes'])} available, "
                   f"cgroup limit {format_bytes(limit) if limit is not None else 'none'}"),
    ]  # fmt: skip
    for name, disk in facts["disks"].items():
        title = "disk here" if name == "here" else "/dev/shm"
        free, total = format_bytes(disk["free_bytes"]), format_bytes(disk["total_bytes"])
        lines.append((title, f"{free} free of {total}, {disk['kind']}{'' if disk['writable'] else ', NOT WRITABLE'}"))
    for index, gpu in enumerate(facts["gpus"]["devices"]):
        size = format_bytes(gpu["memory_bytes"]) if gpu["memory_bytes"] is not None else "memory unknown"
        more = (", MIG" if gpu["mig"] else "") + (f", {gpu['ecc_errors']} ECC errors" if gpu["ecc_errors"] else "")
        known = gpu["known_as"] or "unknown device, so without MFU"
        lines.append((f"gpu {index}", f"{gpu['name']} ({known}), {size}, driver {gpu['driver']}{more}"))
    if not facts["gpus"]["devices"]:
        lines.append(("gpus", facts["gpus"]["problem"] or "none found by a driver tool"))
    return lines


def _torch_lines(torch: dict[str, Any] | None) -> list[tuple[str, str]]:
    from smalti.base.units import format_bytes

    if torch is None:
        return [("torch", "skipped (--no-torch)")]
    if "problem" in torch:
        return [("torch", torch["problem"].replace("\n", " / "))]
    device = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['rocm']}" if torch["rocm"] else "CPU only"
    lines = [("torch", f"{torch['version']}, {device}")]
    devices = torch["devices"] if isinstance(torch["devices"], list) else []
    for index, device in enumerate(devices):
        bf16 = "" if device["bf16"] else ", no bf16"
        shown = f"{device['name']}, {format_bytes(device['memory_bytes'])}, capability {device['capability']}{bf16}"
        lines.append((f"torch device {index}", shown))
    for name in ("bf16_on_cpu", "cpu_capability", "threads", "distributed", "nccl", "cudnn", "grouped_mm", "attention",
                 "flex_attention", "flash_attn_package", "triton", "cpp_compiler", "devices"):  # fmt: skip
        value = torch.get(name)
        if name != "devices" or isinstance(value, str):
            lines.append((f"torch {name}", _plain(value)))
    kernels = torch.get("attention_kernels")
    for name, chosen in kernels.items() if isinstance(kernels, dict) else ():
        lines.append((f"attention on {name}", ", ".join(f"{use}: {kernel}" for use, kernel in chosen.items())))
    return lines


def _packages(extras: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a line for each extra; for ``dev`` only where it is complete."""
    lines = []
    for extra, listed in extras.items():
        if extra != "dev" or not any(package["problem"] for package in listed.values()):
            lines.append((f"packages: {extra}", _extra_text(extra, listed)))
    return lines


def _extra_text(extra: str, listed: dict[str, dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {package['version']}" for name, package in listed.items() if package["version"])
    wrong = {name: package["problem"] for name, package in listed.items() if package["problem"]}
    if not wrong:
        return f"complete: {versions}"
    lacking = ", ".join(f"{name} ({problem})" for name, problem in wrong.items())
    target = "smalti" if extra == "core" else f"smalti[{extra}]"
    return f"missing {lacking}; pip install '{target}'" + (f"; has {versions}" if versions else "")


def _surroundings(facts: dict[str, Any]) -> list[tuple[str, str]]:
    present = [f"{name} ({version})" for name, version in facts["storage"].items() if version]
    missing = [f"{name} (pip install {_STORAGE[name][1]})" for name, version in facts["storage"].items() if not version]
    ray = facts["ray"]["version"]
    return [
        ("storage", ", ".join(present) + (f"; not {', '.join(missing)}" if missing else "")),
        ("ray", f"{ray}{', RAY_ADDRESS is set' if facts['ray']['inside_cluster'] else ''}" if ray else "not installed"),
        ("programs", ", ".join(facts["tools"]) or "none (drivers, schedulers, containers)"),
        ("launcher", "yes: RANK and WORLD_SIZE are set" if facts["inside_launcher"] else "none"),
        ("slurm job", "yes" if facts["slurm_job"] else "no"),
    ]


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
