"""``smalti serve`` as a process: the port, the key, the signals, the exit codes."""

import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from server_process import start_server
from tiny_runs import tiny_run

from smalti.cli.main import run as smalti
from smalti.distributed.checkpoint.export import export

KEY = "a-key-of-some-length"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tiny_run(tmp_path_factory.mktemp("process"), context=2048)
    export(run)
    return run


def test_a_taken_port_exits_2(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert smalti(["serve", str(run), "--port", str(other.getsockname()[1])]) == 2
    assert "in use by another program\nhint: --port 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "SMALTI_SERVE_KEY"),
        (["--host", "::"], "--key-file"),
        (["--host", "no.such.host.invalid"], "cannot be resolved"),
        (["--host", "203.0.113.7", "--key-file", "KEY"], "not an address of this machine"),
        (["--port", "70000"], "0 (any free port) to 65535"),
        (["--port", "-1"], "65535"),
        (["--max-rows", "0"], "1 or more"),
        (["--max-waiting", "-1"], "0 or more"),
        (["--max-body-mb", "nan"], "more than 0"),
        (["--max-connections", "0"], "1 or more"),
        (["--max-connections", "1000000000"], "open files"),
        (["--finish-s", "-1"], "0 to 86400"),
        (["--dtype", "int3", "--port", "0"], "fp32, bf16"),
        (["--key-file", "EMPTY"], "no key on its first line"),
        (["--key-file", "SHORT"], "16 or more"),
        (["--key-file", "NOWHERE"], "does not exist"),
    ],
)
def test_wrong_options_exit_2(
    run: Path, options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("KEY", KEY), ("EMPTY", "\n"), ("SHORT", "short")):
        (tmp_path / name).write_text(text)
    options = [str(tmp_path / word) if word.isupper() else word for word in options]
    assert smalti(["serve", str(run), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_export_and_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smalti(["serve", str(tiny_run(tmp_path))]) == 2
    assert "hint: smalti export" in capsys.readouterr().err
    assert smalti(["serve", "--help"]) == 0
    assert "Example: smalti serve runs/demo" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["file", "environment"])
def test_with_a_key_every_host_may_listen(run: Path, tmp_path: Path, how: str) -> None:
    (tmp_path / "key").write_text(KEY + "\n")
    options = ["--key-file", str(tmp_path / "key")] if how == "file" else []
    with start_server(
        run, "--host", "0.0.0.0", *options, env={"SMALTI_SERVE_KEY": KEY if not options else ""}
    ) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/health").status_code == 401
        headers = {"Authorization": f"Bearer {KEY}", "Host": "model.example.org", "Origin": "https://model.example.org"}
        assert httpx.get(f"{url}/health", headers=headers).status_code == 200
        with httpx.Client() as client:  # a connection that is kept alive does not hold the server
            client.get(f"{url}/health", headers=headers)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
    assert KEY not in "".join(server.errors)


LONG = {"prompt": "def ", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_running_requests_end_before_the_server(run: Path, number: int) -> None:
    answers: list[httpx.Response] = []
    with start_server(run) as server:
        ask = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=60))
        )
        ask.start()
        _wait_until_running(server)
        server.process.send_signal(number)
        assert server.process.wait(60) == 0
        ask.join(20)
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 300
    told = "".join(server.errors)
    # the page of metrics that the test asked for last may count as well
    assert re.search(r"finishing \d answers? \(up to 30\.0s\); press Ctrl-C again to stop now\n", told)
    assert not any(word in told for word in ("Traceback", "cut off\n"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_does_not_end_in_time_is_cut_off(run: Path, number: int, code: int) -> None:
    with start_server(run, "--finish-s", "0.1") as server:
        body = {**LONG, "prompt": ["def "] * 32, "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()  # kept: httpx closes the connection with it
            next(lines)
            server.process.send_signal(number)
            assert server.process.wait(30) == code
            with pytest.raises(httpx.HTTPError):
                for _ in lines:
                    pass
    told = "".join(server.errors)
    assert told.endswith("1 answer cut off\n")
    assert not any(word in told for word in ("Traceback", "Cancel"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("stream", [True, False])
def test_a_second_ctrl_c_cuts_off_with_one_line(run: Path, stream: bool) -> None:
    with start_server(run) as server:
        body = {**LONG, "prompt": ["def "] * 32, "max_tokens": 2000, "stream": stream}

        def ask() -> None:
            with suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        _wait_until_running(server)
        server.process.send_signal(signal.SIGINT)
        end_s = time.monotonic() + 10
        while not any("finishing " in line for line in server.errors):
            assert time.monotonic() < end_s
            time.sleep(0.005)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 130
        asking.join(20)
    told = "".join(server.errors)
    assert told.endswith("1 answer cut off\n")
    assert not any(word in told for word in ("Traceback", "Exception", "Cancel"))


@pytest.mark.exhaustive
def test_a_looping_chat_template_does_not_hold_the_server(run: Path, tmp_path: Path) -> None:
    """The whole command: prompts that wait for the looping one must not keep the process from ending either."""
    model = tmp_path / "model"
    shutil.copytree(run / "export", model)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loop)
    body = {"messages": [{"role": "user", "content": "x"}]}
    with start_server(model) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert "took more than 2 s of processor time" in answer.json()["error"]["message"]

        def ask() -> None:
            with suppress(httpx.HTTPError):
                httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

        asking = [threading.Thread(target=ask) for _ in range(20)]
        for thread in asking:
            thread.start()
        time.sleep(0.5)
        assert httpx.get(f"{server.url}/health", timeout=20).status_code == 200
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert server.process.wait(30) == 130  # 20 prompts in turn would take 40 s of processor time
        for thread in asking:
            thread.join(20)


def _wait_until_running(server) -> None:
    end_s = time.monotonic() + 20
    while not server.metric("smalti_num_requests_running"):
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.mark.slow
def test_the_extra_is_named_where_it_is_missing(run: Path) -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        f"from smalti.cli.main import run; sys.exit(run(['serve', {str(run)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "pip install 'smalti[serve]'" in done.stderr) == (2, True)
