"""Copies in the memory of another node: what a holder takes and gives, and a run that has lost its node."""

import errno
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import toy_run
from forked_command import ForkedCommand, start
from made_checkpoints import checkpoint, digests
from network_nodes import nodes, why_not

from smalti.base.errors import DataError, RetryableError, UserError
from smalti.config.load import dump
from smalti.config.run import RunConfig
from smalti.fleet.agent import memory
from smalti.fleet.neighbour import client, holder, stream
from smalti.fleet.neighbour.client import Neighbour, neighbour
from smalti.track.checkpoints import manifest
from smalti.track.checkpoints.names import complete, step_of
from smalti.track.run import RunFolder

KEY = "a key"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALTI_PEER_KEY", KEY)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a holder, and its folder."""
    folder = tmp_path / "held"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=holder.Holder(folder, KEY.encode()).serve, args=(listener,), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", folder


def _config(root: Path, address: str, **train: Any) -> RunConfig:
    return toy_run.config(root, checkpoint={"peer_copies": "2step", "peer_node": address}, **train)


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.01)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))  # none where it does not exist yet


def test_a_copy_is_sent_replaced_fetched_and_dropped(tmp_path: Path, held: tuple[str, Path]) -> None:
    address, folder = held
    (tmp_path / "memory").mkdir()
    peer = Neighbour(address, _config(tmp_path, address))
    assert peer.fetch(tmp_path / "memory", newer_than=-1) is None
    for step in (3, 7):
        peer._send(checkpoint(tmp_path / "run", step))
        assert _names(folder / "dense") == [f"step-{step:08d}"], "the newest alone"
    assert peer.fetch(tmp_path / "memory", newer_than=7) is None, "the disk has it"
    fetched = peer.fetch(tmp_path / "memory", newer_than=6)
    assert fetched == tmp_path / "memory/step-00000007"
    assert digests(fetched) == digests(tmp_path / "run/step-00000007")
    assert _names(tmp_path / "memory") == ["step-00000007"]
    peer.drop()
    assert not (folder / "dense").exists()


def test_a_copy_of_another_run_is_not_used(tmp_path: Path, held: tuple[str, Path]) -> None:
    address, _ = held
    Neighbour(address, _config(tmp_path, address))._send(checkpoint(tmp_path / "run", 3))
    other = Neighbour(address, _config(tmp_path, address, optimizer={"lr": 1e-4}))
    assert other.fetch(tmp_path / "run", newer_than=-1) is None


def test_a_copy_that_changed_on_its_way_is_refused_and_the_one_before_remains(
    tmp_path: Path, held: tuple[str, Path]
) -> None:
    address, folder = held
    peer = Neighbour(address, _config(tmp_path, address))
    peer._send(checkpoint(tmp_path / "run", 3))
    path = checkpoint(tmp_path / "run", 5)
    _flip(path / "shards/00001.safetensors")
    with pytest.raises(DataError, match=r"step 5 is not what was sent: .*00001\.safetensors does not match its digest"):
        peer._send(path)
    assert _names(folder / "dense") == ["step-00000003"]


def test_a_copy_that_was_damaged_in_memory_is_not_fetched(tmp_path: Path, held: tuple[str, Path]) -> None:
    address, folder = held
    config = _config(tmp_path, address)
    Neighbour(address, config)._send(checkpoint(tmp_path / "run", 3))
    _flip(folder / "dense/step-00000003/shards/00000.safetensors")
    (tmp_path / "memory").mkdir()
    with (
        pytest.raises(RetryableError, match=r"peer_node=.* was not asked .*00000\.safetensors does not match"),
        neighbour(config, RunFolder(tmp_path / "none"), tmp_path / "memory"),
    ):
        pass
    assert not _names(tmp_path / "memory")


def _flip(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)


def test_what_does_not_fit_is_refused(tmp_path: Path, held: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, folder = held
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(holder.shutil, "disk_usage", lambda _: usage._replace(free=100_000))
    with pytest.raises(DataError, match=r"a copy of .* does not fit: .* are free"):
        Neighbour(address, _config(tmp_path, address))._send(checkpoint(tmp_path / "run", 3))
    assert not folder.joinpath("dense").exists()


def test_a_process_without_the_key_gets_no_proof_to_relay() -> None:
    """It listens, and passes what a client sends to another one: neither answers before a server has proved itself."""
    errors: list[BaseException] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def join() -> None:
            try:
                stream.connect("127.0.0.1", port, KEY.encode(), silence_s=5)
            except BaseException as error:
                errors.append(error)

        clients = [threading.Thread(target=join) for _ in range(2)]
        for client_thread in clients:
            client_thread.start()
        first, second = (stream.Connection(listener.accept()[0].detach()) for _ in clients)
        for sender, receiver in ((first, second), (second, first)):
            receiver.send_bytes(sender.recv_bytes(100))
        for each in (first, second):
            each.send_bytes(b"?" * 32)
        for client_thread in clients:
            client_thread.join(20)
        for each in (first, second):
            with pytest.raises((EOFError, OSError)):
                each.recv_bytes()
            each.close()
    assert [type(error) for error in errors] == [stream.AuthenticationError] * 2


def test_a_proof_of_one_role_and_of_other_numbers_is_refused(held: tuple[str, Path]) -> None:
    host, port = held[0].split(":")
    for role in ("server", "client"):
        with stream.Connection(socket.create_connection((host, int(port))).detach()) as connection:
            connection.send_bytes(b"n" * 32)
            nonces = b"n" * 32 + connection.recv_bytes()
            proof = connection.recv_bytes()
            assert proof == stream._proof(KEY.encode(), b"server", nonces)
            connection.send_bytes(proof if role == "server" else stream._proof(KEY.encode(), b"client", nonces[::-1]))
            with pytest.raises((EOFError, OSError)):
                connection.recv_bytes()


def test_an_error_of_the_system_does_not_end_a_listener_and_closing_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(socket.socket):
        errors: ClassVar = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ECONNABORTED, "aborted")]

        def accept(self) -> tuple[socket.socket, Any]:
            if self.errors:
                raise self.errors.pop()
            return super().accept()

    monkeypatch.setattr(stream, "_PAUSE_S", 0.01)
    monkeypatch.setattr(stream, "_UNPROVED", 1)
    listener = Failing()
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def answer(connection: stream.Connection, host: str) -> None:
        stream.send_message(connection, {"host": host})

    serving = threading.Thread(target=stream.serve, args=(listener, KEY.encode(), answer), daemon=True)
    serving.start()
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):  # it proves nothing; no second one is answered until it ends
        time.sleep(0.1)
        with pytest.raises(BlockingIOError):
            stream.connect("127.0.0.1", port, KEY.encode(), silence_s=0.5)
    with stream.connect("127.0.0.1", port, KEY.encode()) as connection:
        assert stream.receive_message(connection) == {"host": "127.0.0.1"}
    stream.end_listening(listener)
    serving.join(20)
    assert not serving.is_alive()


def test_another_key_and_a_connection_that_breaks_leave_nothing(
    tmp_path: Path, held: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = held
    host, port = address.split(":")
    with pytest.raises(stream.AuthenticationError):
        stream.connect(host, int(port), b"another key")
    path = checkpoint(tmp_path / "run", 3)
    with stream.connect(host, int(port), KEY.encode()) as connection, stream.opened_files(path) as files:
        put = {"do": "put", "run": "dense", "step": 3, "config": "", "files": stream.sizes(files)}
        stream.send_message(connection, put)
        stream.receive_message(connection)
        connection.send_bytes(b"x" * 1000)
        _wait(lambda: bool(_names(folder / "dense")))
    _wait(lambda: not _names(folder / "dense"))
    for name in ("../a", "/a", ".", ""):
        with stream.connect(host, int(port), KEY.encode()) as connection:
            stream.send_message(connection, {"do": "drop", "run": name})
            with pytest.raises(DataError, match="is no name of a run"):
                stream.receive_message(connection)
    for name in ("../a", "/a", "a//b"):
        with stream.connect(host, int(port), KEY.encode()) as connection:
            stream.send_message(connection, put | {"files": [(name, 5)]})
            stream.receive_message(connection)
            with pytest.raises(DataError, match="is no file of a checkpoint"):
                stream.receive_message(connection)
    assert _names(tmp_path) == sorted(["held", "run"])


def test_each_new_copy_is_sent_and_that_of_a_run_that_is_done_is_dropped(
    tmp_path: Path, held: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, folder = held
    config, shared = _config(tmp_path, address), tmp_path / "memory"
    shared.mkdir()
    monkeypatch.setattr(client, "_PAUSE_S", 0.01)
    run = RunFolder(config.run_folder)
    with neighbour(config, run, shared):
        for step in (3, 5):
            checkpoint(shared, step, keep=1)
            _wait(lambda: (folder / f"dense/step-{step:08d}").exists())  # noqa: B023
    assert manifest.fault(folder / "dense/step-00000005") is None
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    with neighbour(config, run, fresh):
        assert _names(fresh) == ["step-00000005"]
        checkpoint(run.checkpoints, config.length.total_steps)
    assert not (folder / "dense").exists()


def test_a_node_that_does_not_answer_is_an_error_at_the_start_and_no_missing_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    config = _config(tmp_path, address)
    with (
        pytest.raises(RetryableError, match=r"peer_node=127\.0\.0\.1:\d+ was not asked .*ConnectionRefused"),
        neighbour(config, RunFolder(tmp_path / "none"), tmp_path),
    ):
        pass
    monkeypatch.delenv("SMALTI_PEER_KEY")
    with pytest.raises(UserError, match="needs the key"), neighbour(config, RunFolder(tmp_path), tmp_path):
        pass
    with pytest.raises(UserError, match="the same key"), holder.hold("127.0.0.1", 0):
        pass


@pytest.mark.slow  # processes
def test_a_run_that_lost_its_node_continues_from_the_memory_of_another_to_the_bit(tmp_path: Path) -> None:
    """Every process of the node n1 is killed and its memory is gone; n3 fetches the copy from n2."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with nodes(3) as made:

        def on(node: str, *arguments: str) -> ForkedCommand:
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
            return start(*arguments, in_agent=made.entry(node), environment=environment)

        keeper = on("n2", "fleet", "hold", "--host", made.address("n2"))
        _wait(lambda: "holding copies at 10.77.0.2:7390" in keeper.output())
        before = _folders()
        config = _of_node(tmp_path / "one", peer_node="10.77.0.2:7390")
        recipe = tmp_path / "one/recipe.yaml"
        recipe.write_text(dump(config))
        on("n1", "train", str(recipe))
        _wait(lambda: any(step_of(name) >= 9 for folder in before for name in complete(folder / "dense")))
        made.kill("n1")
        for folder in _folders() - before:
            shutil.rmtree(folder)
        assert not complete(f"{config.run_folder}/checkpoints"), "nothing was on the disk"
        code, output = on("n3", "train", str(recipe)).finish(300)
        assert code == 0, output
        assert "was fetched from 10.77.0.2:7390" in output
        assert not any((folder / "dense").exists() for folder in before), "the run is done"
        keeper.send_signal(signal.SIGTERM)
        assert keeper.finish()[0] == 143
        assert _folders() < before
    [resumed] = [event for event in RunFolder(config.run_folder).events() if event["event"] == "resumed"]
    assert resumed["source"] == "peer memory"
    assert resumed["step"] >= 9
    undisturbed = _of_node(tmp_path / "two")
    (tmp_path / "two/recipe.yaml").write_text(dump(undisturbed))
    code, output = start("train", str(tmp_path / "two/recipe.yaml")).finish(300)
    assert code == 0, output
    assert _shards(config) == _shards(undisturbed)


def _of_node(root: Path, **section: str) -> RunConfig:
    checkpoint = {"every": "1run", "peer_copies": "3step", **section}
    return toy_run.config(root, duration="40step", checkpoint=checkpoint, parallel={"ranks": 2, "threads": 1})


def _folders() -> set[Path]:
    return set(memory.SHARED.glob(f"smalti-{os.getuid()}-*"))


def _shards(config: RunConfig) -> dict[str, str]:
    files = digests(Path(config.run_folder) / "checkpoints/step-00000040")
    return {name: digest for name, digest in files.items() if name.startswith("shards/")}


def test_an_address_without_a_port_and_one_without_copies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="peer_node=n2 is not the address of a node"):
        _config(tmp_path, "n2")
    for port in ("99999", "0"):
        with pytest.raises(UserError, match=f"peer_node=n2:{port} is not the address of a node") as raised:
            _config(tmp_path, f"n2:{port}")
        assert "a port of 1 to 65535" in str(raised.value.allowed)
    with pytest.raises(UserError, match="peer_node has no effect without peer_copies"):
        toy_run.config(tmp_path, checkpoint={"peer_node": "n2:1"})


def test_the_memory_of_a_holder_is_removed_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SHARED", tmp_path)
    with holder.hold("127.0.0.1", 0) as address:
        assert address.startswith("127.0.0.1:")
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not _names(tmp_path)
