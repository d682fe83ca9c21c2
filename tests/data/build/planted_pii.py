"""Documents with planted personal data of each kind in many contexts, and with what only looks like it. Seeded.

Two sets share no context and no negative: the rules were written looking at ``SEEN``; ``ASIDE`` was tried at the end.
"""

import base64
import random
import string
from collections.abc import Callable
from typing import NamedTuple

from planted_documents import prose

from smalti.data.build.clean.numbers import is_iban, is_luhn

Maker = Callable[[random.Random], str]


class Planted(NamedTuple):
    """A text, and the spans that are personal data in it."""

    text: str
    spans: list[tuple[int, int, str]]


class Contexts(NamedTuple):
    """Where values are planted: ``{}`` is the value."""

    of: dict[str, list[tuple[str, Maker]]]
    """Kind -> contexts, each with what makes a value for it."""
    negatives: list[Maker]


def _pick(rng: random.Random, alphabet: str, n: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(n))


def _digits(rng: random.Random, n: int) -> str:
    return _pick(rng, string.digits, n)


BASE62 = string.ascii_letters + string.digits


def _random_token(n: int, alphabet: str = BASE62) -> Maker:
    def make(rng: random.Random) -> str:
        while True:
            token = _pick(rng, alphabet, n)
            if any(map(str.isdigit, token)) and any(map(str.islower, token)) and token[-1].isalnum():
                return token

    return make


def _prefixed(prefix: str, n: int) -> Maker:
    return lambda rng: prefix + _pick(rng, BASE62, n)


def _card(prefix: str, n: int, groups: tuple[int, ...] = (), separator: str = " ") -> Maker:
    def make(rng: random.Random) -> str:
        digits = prefix + _digits(rng, n - len(prefix) - 1)
        digits += next(digit for digit in string.digits if is_luhn(digits + digit))
        parts, at = [], 0
        for width in groups or (n,):
            parts.append(digits[at : at + width])
            at += width
        return separator.join(parts)

    return make


def _iban(country: str, n: int, separator: str = "") -> Maker:
    def make(rng: random.Random) -> str:
        account = _digits(rng, n - 4)
        for check in range(100):
            compact = f"{country}{check:02d}{account}"
            if is_iban(compact):
                return separator.join(compact[at : at + 4] for at in range(0, n, 4))
        raise AssertionError("no check digits")

    return make


def _private_key(lines: int, kind: str, *, ends: bool = True, newline: str = "\n", headers: str = "") -> Maker:
    def make(rng: random.Random) -> str:
        body = base64.b64encode(rng.randbytes(48 * lines)).decode()
        rows = [body[at : at + 64] for at in range(0, len(body), 64)]
        parts = [f"-----BEGIN {kind}-----", *([headers] if headers else []), *rows]
        return newline.join([*parts, f"-----END {kind}-----"] if ends else parts)

    return make


def _email(rng: random.Random) -> str:
    name = _pick(rng, string.ascii_lowercase, rng.randint(3, 9))
    host = rng.choice(["example.com", "mail.example.co.uk", "uni-example.de", "example.museum", "a1.example.io"])
    return f"{name}{rng.choice(['', '.smith', '_x', '+news', '42'])}@{host}"


def _international_email(rng: random.Random) -> str:
    name = _pick(rng, string.ascii_lowercase, 5)
    return f"{name}@{rng.choice(['пример.рф', 'xn--e1afmkfd.xn--p1ai', 'bücher.example', 'shop.xn--fiqs8s'])}"


def _hidden_email(rng: random.Random) -> str:
    return f"{_pick(rng, string.ascii_lowercase, 6)} [at] example [dot] org"


def _phone(pattern: str) -> Maker:
    return lambda rng: "".join(str(rng.randint(2, 9)) if char == "#" else char for char in pattern)


def _ipv4(rng: random.Random) -> str:
    return (
        f"{rng.choice([10, 77, 172, 185, 192, 203])}.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(20, 254)}"
    )


def _ipv6(rng: random.Random) -> str:
    groups = [f"{rng.randrange(1 << 16):x}" for _ in range(5)]
    return (
        f"2a02:{rng.randint(1000, 9999)}:"
        + ":".join(groups[:2])
        + "::"
        + ":".join(f"{rng.randint(1, 9)}{g}"[:4] for g in groups[2:])
    )


def _credentials(rng: random.Random) -> str:
    return f"{_pick(rng, string.ascii_lowercase, 5)}:{_pick(rng, BASE62 + '!$_-', rng.randint(6, 20))}"


def _sure_random(rng: random.Random) -> str:
    return _random_token(rng.randint(32, 48))(rng)


SEEN = Contexts(
    {
        "email": [
            ("Write to {}, please.", _email),
            ("<{}>", _email),
            ("mailto:{}", _email),
            ("Author: Jane Doe <{}>", _email),
            ('"contact": "{}",', _email),
            ("Questions ({}) are welcome.", _email),
            ("E-Mail: {}", _international_email),
            ("Mail {} or call.", _hidden_email),
        ],
        "phone": [
            ("Call {} today.", _phone("+49 30 #######")),
            ("Call {} today.", _phone("+1 (###) ###-####")),
            ("Phone: {}", _phone("### ### ####")),
            ("You reach us under {}.", _phone("### ### ####")),
            ("({})", _phone("1 ### ### ####")),
            ("{} is the office.", _phone("(###) ###-####")),
            ("Office {}, Fax", _phone("###-###-####")),
            ("Office {}", _phone("020 #### ####")),
            ("Tel. {}", _phone("0##/#######")),
            ("電話番号 {}", _phone("03-####-####")),
            ("тел. {}", _phone("8 (###) ###-##-##")),
            ("au {} le matin", _phone("01 ## ## ## ##")),
        ],
        "ip": [
            ("The server {} answered.", _ipv4),
            ('{} - - [10/Oct/2000:13:55:36 -0700] "GET / HTTP/1.0" 200 2326', _ipv4),
            ("http://{}/index.html", _ipv4),
            ("ssh root@{}", _ipv4),
            ("listen {}:8080", _ipv4),
            ("from {} port 22", _ipv6),
            ("remote_addr={}", _ipv4),
        ],
        "iban": [
            ("IBAN: {}", _iban("DE", 22)),
            ("Pay to {}, please.", _iban("DE", 22, " ")),
            ("Account {} BIC DEUTDEFF", _iban("FR", 27, " ")),
            ("({})", _iban("ES", 24)),
            ("to {}; thanks", _iban("AT", 20, " ")),
        ],
        "card": [
            ("Card {}.", _card("4", 16)),
            ("Card {} exp 12/27", _card("4", 16, (4, 4, 4, 4))),
            ("{} 12/27 123", _card("52", 16, (4, 4, 4, 4))),
            ("card {} 123", _card("4", 16)),
            ("2027-12 {} 842", _card("55", 16, (4, 4, 4, 4), "-")),
            ("{},12/27,123", _card("4", 16)),
            ("Amex {} 1234", _card("37", 15, (4, 6, 5))),
            ("number={}&cvv=123", _card("51", 16)),
            ("{}/0927/771", _card("6011", 16, (4, 4, 4, 4))),
            ("Diners {}", _card("36", 14, (4, 6, 4))),
        ],
        "secret": [
            ("aws_access_key_id = {}", lambda rng: "AKIA" + _pick(rng, string.ascii_uppercase + string.digits, 16)),
            ("export GITHUB={}", _prefixed("ghp_", 36)),
            ("use {} as key", _prefixed("sk-proj-", 40)),
            ("api_key = '{}'", _random_token(24)),
            ('"client_secret": "{}"', _random_token(32)),
            ("Authorization: Bearer {}", _random_token(40)),
            ("DB_PASSWORD={}", _random_token(20)),
            ("userToken: {}", _random_token(28)),
            ("postgres://{}@db.example.com:5432/app", _credentials),
            ("git clone https://{}@git.example.org/a.git", _credentials),
            ("the value {} is ours", _sure_random),
            ("MY_CRED={}", _sure_random),
            ('login("{}")', _sure_random),
            ("{}", _private_key(25, "RSA PRIVATE KEY")),
            ("{}", _private_key(3, "EC PRIVATE KEY")),
            ("{}\n\nThen we went home.", _private_key(12, "OPENSSH PRIVATE KEY", ends=False)),
            ('"private_key": "{}"', _private_key(26, "PRIVATE KEY", newline="\\n")),
            ("{}", _private_key(200, "RSA PRIVATE KEY")),
            (
                "{}",
                _private_key(9, "RSA PRIVATE KEY", headers="Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A1B2C3D\n"),
            ),
        ],
    },
    [
        lambda rng: f"version {rng.randint(1, 9)}.{rng.randint(0, 20)}.{rng.randint(0, 20)}.{rng.randint(0, 99)}",
        lambda rng: f"pip install foo=={rng.randint(1, 9)}.2.3.{rng.randint(0, 99)}",
        lambda rng: f"foo-1.{rng.randint(0, 9)}.3.{rng.randint(0, 99)}.tar.gz",
        lambda rng: f"ISBN 978-3-16-{_digits(rng, 6)}-0",
        lambda rng: f"commit {rng.getrandbits(160):040x}",
        lambda rng: f"{rng.getrandbits(28):07x} Fix the order of {_digits(rng, 3)} rows",
        lambda rng: f"sha256:{rng.getrandbits(256):064x}",
        lambda rng: f'"integrity": "sha512-{base64.b64encode(rng.randbytes(64)).decode()}"',
        lambda rng: (
            f"id {rng.getrandbits(32):08x}-{_digits(rng, 4)}-4a{_digits(rng, 2)}-8{_digits(rng, 3)}-{_digits(rng, 12)}"
        ),
        lambda rng: f"http://127.0.0.1:{rng.randint(1000, 9999)}/",
        lambda rng: "bind 0.0.0.0 with mask 255.255.255.0",
        lambda rng: f"20{_digits(rng, 2)}-11-24T11:38:{rng.randint(10, 59)}.{_digits(rng, 6)}Z",
        lambda rng: f"at {1_600_000_000_000 + rng.randrange(10**11)} ms, {1_600_000_000 + rng.randrange(10**8)} s",
        lambda rng: f"20{rng.randint(10, 29)}1124{rng.randint(100000, 235959)}",
        lambda rng: f"tensor.shape == (64, {rng.randint(1, 9)}, 128); x = a @ b.T + {rng.random()}",
        lambda rng: f"@app.route('/v{rng.randint(1, 9)}')\ndef handler(request): pass",
        lambda rng: f"icon@{rng.randint(2, 3)}x.png",
        lambda rng: "git clone git@github.com:example/project.git",
        lambda rng: f"std::chrono::duration at 12:{rng.randint(10, 59)}:30 in a ratio of 4:3:2",
        lambda rng: " ".join(str(rng.randint(0, 999)) for _ in range(8)),
        lambda rng: " ".join(f"{rng.random() * 1000:.{rng.randint(1, 6)}f}" for _ in range(6)),
        lambda rng: f"{_digits(rng, 3)},{_digits(rng, 3)},{_digits(rng, 3)} people in {rng.randint(1900, 2030)}",
        lambda rng: "token = tokenizer.encode_plus_v2(text); secret = settings.CLIENT_SECRET_KEY_2",
        lambda rng: "getElementsByTagNameNS2WithHttp2ServerErrorHandler4Test",
        lambda rng: "the token is the unit of the secret language, and the password is none",
        lambda rng: "mysql://${DB_USER}:${DB_PASS}@localhost/app",
        lambda rng: "_ZN4llvm15SmallVectorImplIcE6appendIPKcvEEvT_S5_",
        lambda rng: "Begin with -----BEGIN PRIVATE KEY----- on a line of its own",
        lambda rng: f"order 4{_digits(rng, 9)}",
        lambda rng: f"section 4.{rng.randint(1, 9)}.2.1 says so",
        lambda rng: f"0x{rng.getrandbits(64):016x}: {_digits(rng, 8)} {_digits(rng, 8)}",
        lambda rng: f"pi is 3.1415926535897932384{_digits(rng, 6)}",
    ],
)

ASIDE = Contexts(
    {
        "email": [
            ("Reply-To: {}", _email),
            ("| Jane | {} | Berlin |", _email),
            ("[mail us](mailto:{})", _email),
            ("Signed-off-by: J. Doe <{}>", _email),
            ("{}", _international_email),
            ("ask {} about it", _hidden_email),
        ],
        "phone": [
            ("Mobile {}", _phone("+44 7### ######")),
            ("| {} | Monday |", _phone("### ### ####")),
            ("Reservations {}!", _phone("###.###.####")),
            ("T {} F", _phone("+33 1 ## ## ## ##")),
            ("Hotline: {}", _phone("0800 #######")),
            ("'phone': '{}'", _phone("+1-###-###-####")),
        ],
        "ip": [
            ("client_ip: {}", _ipv4),
            ("Failed password for root from {} port 4222 ssh2", _ipv4),
            ("[{}]", _ipv6),
            ("ping {}", _ipv4),
            ("A record {}.", _ipv4),
        ],
        "iban": [
            ("Kontonummer {} bei der Bank", _iban("CH", 21, " ")),
            ("iban={}&amount=3", _iban("BE", 16)),
            ("| {} |", _iban("PL", 28, " ")),
            ("{}\n", _iban("DE", 22, " ")),
        ],
        "card": [
            ("cc: {} cvc 123", _card("4", 16, (4, 4, 4, 4))),
            ("| {} | 09/26 | 331 |", _card("53", 16)),
            ("{} 0926 331", _card("4", 16)),
            ("Order 17 {} 09-26", _card("2300", 16, (4, 4, 4, 4))),
            ("pan={};", _card("34", 15)),
            ("3 x {} 5", _card("3530", 16, (4, 4, 4, 4), "-")),
            ("'{}'", _card("4", 13)),
        ],
        "secret": [
            ("STRIPE={}", _prefixed("sk_live_", 24)),
            ("slack {}", lambda rng: f"xoxb-{_digits(rng, 12)}-{_pick(rng, BASE62, 24)}"),
            ('auth_token: "{}"', _random_token(36)),
            ("encryption key = {}", _random_token(44)),
            ("redis://{}@cache.example.net/0", _credentials),
            ("curl ftp://{}@files.example.net/x", _credentials),
            ("session {}", _sure_random),
            ("cookie: sid={};", _sure_random),
            ("-H 'X-Custom: {}'", _sure_random),
            ("key:\n{}", _private_key(50, "PRIVATE KEY")),
            ("cut off: {}", _private_key(30, "RSA PRIVATE KEY", ends=False)),
            ("{}", _private_key(14, "DSA PRIVATE KEY", newline="\r\n")),
            ("{}", _private_key(20, "PGP PRIVATE KEY BLOCK", headers="Version: GnuPG v2\n")),
        ],
    },
    [
        lambda rng: f"linux-image-5.10.0.{rng.randint(1, 30)} 5.10.{rng.randint(1, 250)}",
        lambda rng: f"Chrome/{rng.randint(40, 120)}.0.{rng.randint(100, 250)}.{rng.randint(0, 99)} Safari/537.36",
        lambda rng: f"ISBN-10 3-16-{_digits(rng, 6)}-X, ISSN {_digits(rng, 4)}-{_digits(rng, 4)}",
        lambda rng: f"index {rng.getrandbits(28):07x}..{rng.getrandbits(28):07x} 100644",
        lambda rng: f"md5 {rng.getrandbits(128):032x}  file.tar",
        lambda rng: f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5{base64.b64encode(rng.randbytes(33)).decode()}",
        lambda rng: f"data:image/png;base64,{base64.b64encode(rng.randbytes(60)).decode()}",
        lambda rng: f"https://example.com/watch/{_pick(rng, BASE62, 30)}",
        lambda rng: f"doi:10.1{_digits(rng, 3)}/s{_digits(rng, 5)}-020-{_digits(rng, 5)}-{_digits(rng, 1)}",
        lambda rng: "ping ::1 or 127.0.0.1",
        lambda rng: f"[{rng.randint(10, 99)}/{rng.randint(10, 99)}/20{_digits(rng, 2)} 10:11:12.{_digits(rng, 3)}]",
        lambda rng: f"EAN 40{_digits(rng, 11)}",
        lambda rng: "x = self.w@x.grad(1); y = f(a)@g(b)",
        lambda rng: f"| {rng.randint(0, 9)} | {rng.randint(0, 99)}.{rng.randint(0, 99)} | {rng.randint(0, 10**6):,} |",
        lambda rng: f"{_phone('### ###')(rng)} EUR, {_phone('## ### ###')(rng)} SEK",
        lambda rng: f"lat 52.{_digits(rng, 6)}, lon 13.{_digits(rng, 6)}",
        lambda rng: "AbstractSingletonProxyFactoryBeanV2Test3Configuration",
        lambda rng: "password: see the file passwords.txt, token: none",
        lambda rng: "https://user:password@example.com/",
        lambda rng: f"RFC {_digits(rng, 4)}, section 3.{rng.randint(1, 9)}.1.2",
        lambda rng: f"1.{rng.randint(1, 9)}.3.6.1.4.1.{_digits(rng, 4)}",
        lambda rng: f"ticket {_digits(rng, 12)}, tracking 1Z{_digits(rng, 16)}",
    ],
)


def planted(contexts: Contexts, seed: int, n: int) -> list[Planted]:
    """``n`` documents: prose with three values in contexts of their kinds, and two negatives."""
    rng = random.Random(seed)
    everything = [(kind, context, make) for kind, items in contexts.of.items() for context, make in items]
    documents = []
    for number in range(n):
        language = rng.choice(["en", "de", "fr", "ru", "ja"])
        pieces: list[tuple[str, tuple[str, str] | None]] = []
        kinds = list(contexts.of)
        for place in range(3):
            kind = kinds[(3 * number + place) % len(kinds)]
            kind, context, make = rng.choice([item for item in everything if item[0] == kind])
            value = make(rng)
            pieces.append((context.format(value), (kind, value)))
        pieces += [(rng.choice(contexts.negatives)(rng), None) for _ in range(2)]
        rng.shuffle(pieces)
        text, spans = "", []
        for piece, value in pieces:
            text += prose(rng, language, 1) + "\n"
            if value is not None:
                start = len(text) + piece.index(value[1])
                spans.append((start, start + len(value[1]), value[0]))
            text += piece + "\n"
        documents.append(Planted(text + prose(rng, language, 1), spans))
    return documents


class Score(NamedTuple):
    """Of a kind."""

    planted: int
    found: int
    right: int
    """Found exactly: kind, start and end."""

    @property
    def recall(self) -> float:
        """Share of the planted that is found."""
        return self.right / self.planted

    @property
    def precision(self) -> float:
        """Share of the found that was planted."""
        return self.right / max(self.found, 1)


def scores(documents: list[Planted], find: Callable[[str], list[tuple[int, int, str]]]) -> dict[str, Score]:
    """Kind -> how well ``find`` does."""
    counts: dict[str, list[int]] = {}
    for document in documents:
        found = {tuple(span) for span in find(document.text)}
        for _, _, kind in document.spans:
            counts.setdefault(kind, [0, 0, 0])[0] += 1
        for span in found:
            counts.setdefault(span[2], [0, 0, 0])[1] += 1
            counts[span[2]][2] += span in document.spans
    return {kind: Score(*count) for kind, count in sorted(counts.items())}
