"""Tokenizing: the bulk path of `smalti data tokenize` against tiktoken, Hugging Face tokenizers and sentencepiece.

All but sentencepiece encode with one vocabulary, which is trained here, and their ids are compared on every document.
Contenders take turns; a ratio compares two runs of one round. Everything is measured on one core and on all cores, to
which the processes are bound. (The file is not called tokenize.py, which would shadow the module of the standard
library.)

    make bench NAME=tokenizer                              the sources of Python's standard library, about 10 minutes
    make bench NAME=tokenizer ARGS='--folder docs --suffix .md --rounds 3 --without sentencepiece'
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paired import ratio_of
from peers import python_of
from record import RecordOption, record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

Work = Callable[[], object]
"""One run of a contender; returns its ids for comparison, the seconds that it measured itself, or None."""


def texts_of(folder: Path, suffix: str) -> list[str]:
    """Return the text of every UTF-8 file below ``folder``, sorted by name, without installed packages."""
    texts = []
    for path in sorted(folder.rglob(f"*{suffix}")):
        if "site-packages" in path.parts or not path.is_file():
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return [text for text in texts if text]


def encoders(tokenizer: Any, texts: list[str], cores: int) -> dict[str, Work]:
    """Return name -> a function that returns the ids of all texts."""
    encoding, why_not = tokenizer._bulk
    assert encoding is not None, why_not
    plain = tokenizer._plain
    return {
        "smalti": lambda: tokenizer.encode_batch(texts, threads=cores),
        "tiktoken": lambda: encoding.encode_ordinary_batch(texts, num_threads=cores),
        "tokenizers": lambda: [text.ids for text in plain.encode_batch(texts, add_special_tokens=False)],
        "tokenizers-fast": lambda: [text.ids for text in plain.encode_batch_fast(texts, add_special_tokens=False)],
    }


def trainers(texts: list[str], vocab_size: int) -> dict[str, Work]:
    """Return our trainer, and tokenizers used directly with the same alphabet and split expression."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from tokenizers import trainers as trainers_of_tokenizers

    from smalti.data.tokenizer.patterns import PATTERNS
    from smalti.data.tokenizer.train import train_bpe

    def theirs() -> None:
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(PATTERNS["cl100k"]), behavior="isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers_of_tokenizers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)

    def ours() -> None:
        train_bpe(texts, vocab_size)

    return {"smalti": ours, "tokenizers": theirs}


def sentencepiece(work: str, folder: Path, cores: int, vocab_size: int) -> Work:
    """Return a run of sentencepiece in its own process, which measures its time without the start of the process."""
    script = ROOT / "bench" / "peers" / "tokenizer_sentencepiece.py"
    command = [python_of("tokenizer"), script, work, folder / "texts.json", folder / "sentencepiece.model"]
    options = ["--cores", str(cores), "--vocab-size", str(vocab_size)]

    def run() -> float:
        done = subprocess.run([*map(str, command), *options], check=True, capture_output=True, text=True)
        return float(json.loads(done.stdout.splitlines()[-1])["seconds"])

    return run


def files_to_files(folder: Path, texts: list[str], tokenizer: Any) -> Work:
    """Return a run of `smalti data tokenize` with an existing tokenizer, from Parquet to token files."""
    from synthetic_corpus import PlantedDocument, write_parquet

    from smalti.config.curate import TokenizeConfig
    from smalti.data.prepare.tokenize import tokenize

    documents = [PlantedDocument(f"text-{number:06d}", text, "base") for number, text in enumerate(texts)]
    write_parquet(documents, folder / "documents", files=1)
    tokenizer.save(folder / "tokenizer")
    config = TokenizeConfig(
        documents=str(folder / "documents"), output=str(folder / "tokens"), tokenizer=str(folder / "tokenizer")
    )

    def run() -> None:
        tokenize(config)

    return run


def turns(contenders: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every contender in each round, after one run of each that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-1, rounds):
        names = list(contenders)
        for name in reversed(names) if number % 2 else names:
            begin = time.perf_counter()
            result = contenders[name]()
            elapsed_s = result if isinstance(result, float) else time.perf_counter() - begin
            del result
            if number >= 0:
                seconds[name].append(elapsed_s)
    return seconds


def speeds(seconds: dict[str, list[float]], megabytes: float) -> dict[str, Any]:
    """Return MB/s, and the ratio of each contender's time to ours, over the rounds."""
    figures: dict[str, Any] = {}
    for name, of_rounds in seconds.items():
        figures[name] = {"megabytes_per_s": megabytes / statistics.median(of_rounds), "seconds": of_rounds}
        if name != "smalti":
            figures[name]["ratio"] = ratio_of(of_rounds, seconds["smalti"], names=(name, "smalti")).figures()
    return figures


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything on the cores that this process may use."""
    from smalti.data.tokenizer.encode import Tokenizer
    from smalti.data.tokenizer.patterns import EOD
    from smalti.data.tokenizer.train import train_bpe

    cores = len(os.sched_getaffinity(0))
    texts = texts_of(Path(options.folder), options.suffix)
    n_bytes = sum(len(text.encode()) for text in texts)
    tokenizer = Tokenizer(train_bpe(texts, options.vocab_size), EOD)
    encode = encoders(tokenizer, texts, cores)
    ids = {name: work() for name, work in encode.items()}
    equal = {name: sum(map(list.__eq__, theirs, ids["smalti"])) for name, theirs in ids.items()}
    n_tokens = sum(map(len, ids.pop("smalti")))
    ids.clear()
    train = trainers(texts, options.vocab_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        encode["files to files"] = files_to_files(folder, texts, tokenizer)
        if "sentencepiece" not in options.without:
            (folder / "texts.json").write_text(json.dumps(texts))
            train["sentencepiece"] = sentencepiece("train", folder, cores, options.vocab_size)
            train["sentencepiece"]()
            encode["sentencepiece"] = sentencepiece("encode", folder, cores, options.vocab_size)
        encoding = speeds(turns(encode, options.rounds), n_bytes / 1e6)
        training = speeds(turns(train, options.train_rounds), n_bytes / 1e6)
    return {
        "cores": cores,
        "documents": len(texts),
        "text_bytes": n_bytes,
        "tokens": n_tokens,
        "documents_with_equal_ids": equal,
        "encode": encoding,
        "train": training,
    }


def show(figures: dict[str, Any]) -> None:
    """Print a table for one number of cores."""
    print(
        f"\ncores: {figures['cores']}; {figures['documents']:,} documents, {figures['text_bytes'] / 1e6:.1f} MB", end=""
    )
    print(f", {figures['tokens']:,} tokens")
    for work in ("encode", "train"):
        for name, row in figures[work].items():
            ratio = row.get("ratio")
            times = f"{ratio['ratio']:.2f}x  ({ratio['ratio_p10']:.2f} to {ratio['ratio_p90']:.2f})" if ratio else ""
            print(f"{work:8}{name:17}{row['megabytes_per_s']:8.2f} MB/s   {times}")
    print(f"documents with the ids of smalti: {figures['documents_with_equal_ids']}")


def main() -> None:
    """Print both tables; ``--record`` also writes bench/results/tokenizer.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", default=sysconfig.get_paths()["stdlib"], help="folder of texts; default: the standard library"
    )
    parser.add_argument("--suffix", default=".py")
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--train-rounds", type=int, default=3)
    parser.add_argument("--without", nargs="*", default=[], choices=["sentencepiece"])
    parser.add_argument("--record", action=RecordOption, help="write bench/results/tokenizer.json")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        print(json.dumps(measure(options)))
        return
    if min(options.rounds, options.train_rounds) < 2:
        parser.error("one round has no spread; use at least 2")
    if "sentencepiece" not in options.without:
        python_of("tokenizer")
    figures = {}
    for name, cores in (("one_core", _cores()[:1]), ("all_cores", _cores())):
        figures[name] = _in_a_child(cores)
        show(figures[name])
    if options.record:
        print("wrote", record("tokenizer", figures))


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _in_a_child(cores: Sequence[int]) -> dict[str, Any]:
    """Run this script on these cores in a new process, because thread pools get their size at first use."""
    command = ["taskset", "--cpu-list", ",".join(map(str, cores)), sys.executable, __file__, *sys.argv[1:], "--inner"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
