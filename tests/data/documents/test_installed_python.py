"""Documents from the installed Python: only docstrings are removed from the code; the result is deterministic."""

import ast
import json
import sysconfig
import warnings
from pathlib import Path

import pytest

from smalti.base.errors import DataError
from smalti.data.documents.docstrings import cut_docstrings
from smalti.data.documents.installed_python import write_documents


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def fake_library(root: Path) -> Path:
    files = {
        "one.py": '"""Module one."""\n\nx = 1  # kept\n\n\ndef f():\n    """Do f."""\n    return x\n',
        "two.py": "def g():\n    '''Only this.'''\n",
        "pkg/__init__.py": '"""The package."""\n',
        "pkg/test/test_one.py": '"""A test."""\nassert 1\n',
        "tkinter/__init__.py": "y = 2\n",
        "site-packages/other.py": "z = 3\n",
        "broken.py": "def (\n",
        "_sysconfigdata__x.py": "build_time_vars = {}\n",
        "pydoc_data/topics.py": "topics = {'b': 'Topic b.\\n', 'a': '\\nTopic a.\\n'}\n",
        "latin.py": b"# -*- coding: latin-1 -*-\ns = '\xe4'\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def test_what_is_written(tmp_path):
    library = fake_library(tmp_path / "lib")
    counts = write_documents(str(tmp_path / "out"), stdlib=str(library))
    code, prose = read(tmp_path / "out" / "code.jsonl"), read(tmp_path / "out" / "prose.jsonl")
    assert {row["id"]: row["text"] for row in code} == {
        "latin.py": "# -*- coding: latin-1 -*-\ns = 'ä'",
        "one.py": "x = 1  # kept\n\n\ndef f():\n    return x",
        "two.py": "def g():\n    pass",
    }
    assert [(row["id"], row["group"], row["text"]) for row in prose] == [
        ("one.py#docstrings", "one.py", "Module one.\n\nf\n\nDo f."),
        ("two.py#docstrings", "two.py", "g\n\nOnly this."),
        ("pkg/__init__.py#docstrings", "pkg/__init__.py", "The package."),
        ("pydoc_data/topics.py#a", "pydoc_data/topics.py", "Topic a."),
        ("pydoc_data/topics.py#b", "pydoc_data/topics.py", "Topic b."),
    ]
    assert all(row["license"].startswith("PSF-2.0") for row in code + prose)
    assert counts.documents == {"code": 3, "prose": 5}
    assert counts.n_bytes["prose"] == sum(len(row["text"].encode()) for row in prose)
    assert [line.split(":")[0] for line in counts.skipped] == ["broken.py"]


def test_everything_takes_tests_and_optional_packages_but_never_site_packages(tmp_path):
    library = fake_library(tmp_path / "lib")
    write_documents(str(tmp_path / "out"), stdlib=str(library), everything=True)
    ids = {row["id"] for row in read(tmp_path / "out" / "code.jsonl")}
    assert {"pkg/test/test_one.py", "tkinter/__init__.py"} <= ids
    assert not any("site-packages" in name for name in ids)


def test_the_same_comes_out_twice(tmp_path):
    library = fake_library(tmp_path / "lib")
    for name in ("a", "b"):
        write_documents(str(tmp_path / name), stdlib=str(library))
    for file in ("code.jsonl", "prose.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_folder_without_python_is_an_error_and_writes_nothing(tmp_path):
    (tmp_path / "lib").mkdir()
    with pytest.raises(DataError, match="holds no Python source"):
        write_documents(str(tmp_path / "out"), stdlib=str(tmp_path / "lib"))
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("source", "code", "docs"),
    [
        ('def f(): "doc"\n', "def f(): pass\n", ["doc"]),
        ('def f(): "doc"; x = 1\n', "def f(): pass; x = 1\n", ["doc"]),
        ('class A:\n    """doc"""  # why\n    x = 1\n', "class A:\n    pass  # why\n    x = 1\n", ["doc"]),
        ('class A:\n    """a\n    b"""\n', "class A:\n    pass\n", ["a\nb"]),
        ('"""äöü"""; x = "ä"\n', 'pass; x = "ä"\n', ["äöü"]),
        ('def ä(): "ö"; "ü"\n', 'def ä(): pass; "ü"\n', ["ö"]),
        ('async def f():\n    """doc"""\n    await g()\n', "async def f():\n    await g()\n", ["doc"]),
        ('x = """not a docstring"""\n"""nor this"""\n', 'x = """not a docstring"""\n"""nor this"""\n', []),
        (
            'if x:\n    def f():\n        """in"""\n        return 1\n',
            "if x:\n    def f():\n        return 1\n",
            ["in"],
        ),
        ('"a" "b"\nx = 1\n', "x = 1\n", ["ab"]),
        ("", "", []),
    ],
)
def test_cut_docstrings(source, code, docs):
    assert cut_docstrings(source) == (code, cut_docstrings(source)[1])
    assert [doc.text for doc in cut_docstrings(source)[1]] == docs


def test_names_are_dotted():
    source = (
        '"""m"""\nclass A:\n    """a"""\n    def f(self):\n        """f"""\n        def g():\n            """g"""\n'
    )
    assert [doc.name for doc in cut_docstrings(source)[1]] == ["", "A", "A.f", "A.f.g"]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def without_docstrings(tree: ast.AST) -> str:
    """The syntax tree with docstrings and ``pass`` taken out, as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            # All string statements at the head: behind a docstring a second one takes its place.
            while node.body and isinstance(node.body[0], ast.Expr) and _is_text(node.body[0].value):
                node.body = node.body[1:]
            node.body = [child for child in node.body if not isinstance(child, ast.Pass)]
    return ast.dump(tree)


@pytest.mark.slow
def test_the_library_keeps_its_meaning(proof):
    """Cut and parsed again, real files have the syntax tree that they had, less the docstrings."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path for path in root.rglob("*.py") if "site-packages" not in path.parts and "lib2to3" not in path.parts
    )
    n = proof(short=20, full=len(paths))
    checked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in paths[:: max(1, len(paths) // n)]:
            try:
                source = path.read_text(encoding="utf-8")
                tree = ast.parse(source)
            except (SyntaxError, UnicodeDecodeError, ValueError):
                continue
            again = ast.parse(cut_docstrings(source)[0])
            assert without_docstrings(again) == without_docstrings(tree), path
            checked += 1
    assert checked >= min(n, 20)
