"""The chat page: what it may load, and what it does in Chromium."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, start_server
from tiny_runs import tiny_run

from smalti.distributed.checkpoint.export import export
from smalti.serve.server.page import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KEY = "a-key-of-some-length"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_markup() -> None:
    answer = page()
    text = bytes(answer.body).decode()
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", text) == ["data:,"]
    assert "http://" not in text
    assert "https://" not in text
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "cookie"):
        assert word not in script[1]
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert page(401).status_code == 401


def test_the_page_names_its_keys() -> None:
    text = bytes(page().body).decode()
    shown = re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL)
    assert "Ctrl+Enter continues, Esc stops" in shown
    assert 'placeholder="Message: Enter sends, Shift+Enter starts a new line"' in shown


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tiny_run(tmp_path_factory.mktemp("page"), context=1024)
    export(run)
    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("neither chromium nor chromium-browser nor google-chrome is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def until(page: Any, condition: str) -> None:
    """Wait until ``condition`` holds. Playwright's own way needs eval, which the page's policy forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"{condition} never came true; the state is '{page.text_content('#state')}'")


class Opened:
    """A page of a server, with all that went wrong on it."""

    def __init__(self, browser: Any, server: ServerProcess, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": 1100, "height": 760}, color_scheme=scheme)
        self.problems: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", lambda message: self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(server.url)

    def narrow_enough(self) -> bool:
        return not self.page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.sample(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_base_model_continues_text(run: Path, browser: Any, scheme: str, tmp_path: Path) -> None:
    with start_server(run) as server:
        opened = Opened(browser, server, scheme)
        page = opened.page
        page.wait_for_selector("#go", state="visible")
        assert page.title() == "tiny"
        page.wait_for_selector("#keys", state="visible")
        page.screenshot(path=str(tmp_path / f"begin-{scheme}.png"))
        page.fill("#seed", "3")
        page.fill("#max-tokens", "20")
        page.fill("#text", "def add(")
        page.keyboard.press("Control+Enter")
        until(page, "document.getElementById('state').textContent.includes('ended')")
        body = {"prompt": "def add(", "seed": 3, "max_tokens": 20, "temperature": 0.8, "top_p": 0.95}
        expected = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]
        continued = page.input_value("#text")
        assert continued.replace("\r", "") == ("def add(" + expected).replace("\r", "")
        assert "tokens/s" in page.text_content("#state")
        page.screenshot(path=str(tmp_path / f"complete-{scheme}.png"))
        page.click("#undo")
        assert page.input_value("#text") == "def add("
        page.fill("#max-tokens", "1000")
        page.fill("#seed", "")
        ended = "/stopped|ended/.test(document.getElementById('state').textContent)"
        for _ in range(20):  # an answer may end by itself before the key is pressed, even after one token
            page.click("#go")
            until(page, f"document.getElementById('text').value.length > 12 || {ended}")
            page.keyboard.press("Escape")
            until(page, ended)
            if "stopped" in page.text_content("#state"):
                break
            page.click("#undo")
        assert "stopped" in page.text_content("#state")
        until(page, "fetch('/metrics').then(r => r.text()).then(t => t.includes('smalti_num_requests_running 0.0'))")
        page.fill("#max-tokens", "0")
        page.click("#go")
        assert "max_tokens" in page.text_content("#state")
        page.set_viewport_size({"width": 390, "height": 700})
        assert opened.narrow_enough()
        assert opened.problems == []
        assert all(url.startswith((server.url, "data:")) for url in opened.urls)
        page.close()


@pytest.mark.slow
@pytest.mark.browser
def test_a_chat_behind_a_key(run: Path, browser: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(run / "export", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "key").write_text(KEY)
    with start_server(folder, "--key-file", str(tmp_path / "key"), "--name", "<b>org/chat</b>") as server:
        opened = Opened(browser, server)
        page = opened.page
        page.wait_for_selector("#key", state="visible")
        page.screenshot(path=str(tmp_path / "key.png"))
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        until(page, "document.getElementById('key-note').textContent.includes('not the key')")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#question", state="visible")
        assert page.get_attribute("#mode-chat", "aria-pressed") == "true"
        page.fill("#max-tokens", "30")
        page.fill("#system", "Be brief.")
        for question in ("<img src=x onerror=alert(1)> plain words", "And\nagain?"):
            page.fill("#question", question)
            page.keyboard.press("Enter")
            until(page, "document.getElementById('send').textContent === 'Send'")
        turns = page.locator(".turn p").all_text_contents()
        assert len(turns) == 4
        assert turns[0] == "<img src=x onerror=alert(1)> plain words"
        assert page.locator(".turn p *").count() == 0  # text only
        assert page.locator("h1 b").count() == 0
        page.screenshot(path=str(tmp_path / "chat.png"))
        page.reload()
        page.wait_for_selector("#question", state="visible")  # the tab remembers the key
        assert page.evaluate("localStorage.length") == 0
        page.click("#mode-text")
        assert page.is_visible("#text")
        page.set_viewport_size({"width": 390, "height": 700})
        assert opened.narrow_enough()
        # Chromium reports the answers of 401 on its console, and nothing else is there.
        assert [text for text in opened.problems if "401" not in text] == []
        page.close()


@pytest.mark.slow
@pytest.mark.browser
def test_a_page_of_another_origin_gets_nothing(run: Path, browser: Any) -> None:
    with start_server(run) as server:
        page = browser.new_page()
        page.route("http://evil.test/*", lambda route: route.fulfill(body="<p>evil</p>", content_type="text/html"))
        page.goto("http://evil.test/")
        body = json.dumps({"prompt": "x", "max_tokens": 5})
        for kind in ("application/json", "text/plain"):
            outcome = page.evaluate(
                """([url, body, kind]) => fetch(url, {method: 'POST', body, headers: {'Content-Type': kind}})
                .then(r => r.text(), error => 'refused')""",
                [f"{server.url}/v1/completions", body, kind],
            )
            assert outcome == "refused"
        page.close()
        assert server.metric("smalti_generation_tokens_total") == 0
