"""The 39 benchmarks of the Gauntlet v0.3: file, kind, shots, chance and prompt, as LLM Foundry's YAML files list them.

The digests are of its files as of 2025-07; licences are those of the original data sets as far as they are known (its
files state none).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from smalti.config.task import Kind, TaskConfig

Category = Literal[
    "world_knowledge",
    "commonsense_reasoning",
    "language_understanding",
    "symbolic_problem_solving",
    "reading_comprehension",
    "programming",
]
CORE: tuple[Category, ...] = (
    "world_knowledge",
    "commonsense_reasoning",
    "language_understanding",
    "symbolic_problem_solving",
    "reading_comprehension",
)
"""The categories of the core average; programs need a sandbox to run in."""

UNKNOWN = "not stated by LLM Foundry"
_BIG_BENCH = "Apache-2.0"
_ANSWER: dict[str, Any] = {"continuation_delimiter": "\nAnswer: "}
_PARTS: dict[str, Any] = {**_ANSWER, "columns": {"category": "category"}}
_REASONING: dict[str, Any] = {
    "answer_delimiter": "The answer is ",
    "continuation_delimiter": "\n\nA:",
    "normalize": False,
    "stop": ("\n\n", "Question:"),
}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark; its file is ``<category>/<file>.jsonl`` below the data folder, or ``<file>.jsonl`` in it."""

    name: str
    category: Category
    file: str
    kind: Kind | Literal["code"]
    shots: int
    chance: float
    sha256: str | None = None
    """The first 16 digits of the digest of the file; None where it is not known."""
    licence: str = UNKNOWN
    prompt: dict[str, Any] = field(default_factory=dict)
    """Fields of ``TaskConfig`` that differ from their defaults."""

    @property
    def path(self) -> str:
        """The file below the data folder, in LLM Foundry's layout."""
        return f"{self.category}/{self.file}.jsonl"

    def task(self, file: str) -> TaskConfig:
        """Return the task on the file at this path."""
        values = {"name": self.name, "kind": self.kind, "file": file, "shots": self.shots, "chance": self.chance}
        return TaskConfig.model_validate(values | self.prompt)


def _of(category: Category, *rows: tuple[Any, ...]) -> tuple[Benchmark, ...]:
    return tuple(Benchmark(row[0], category, *row[1:]) for row in rows)


BENCHMARKS: tuple[Benchmark, ...] = (
    *_of(
        "world_knowledge",
        ("jeopardy", "jeopardy_all", "exact", 3, 0.0, "187e7f270a440c63", UNKNOWN, _PARTS),
        ("bigbench_qa_wikidata", "bigbench_qa_wikidata", "exact", 3, 0.0, "bb0d22727cb25bef", _BIG_BENCH),
        ("arc_easy", "arc_easy", "choice", 3, 0.25, "d2d12e59543acf9a", UNKNOWN, _ANSWER),
        ("arc_challenge", "arc_challenge", "choice", 3, 0.25, "1ae3aeedf1951d88", UNKNOWN, _ANSWER),
        ("mmlu", "mmlu", "choice", 5, 0.25, None, UNKNOWN, _PARTS),
        ("triviaqa_sm_sub", "triviaqa_sm_sub", "generation", 3, 0.0, "e3e8222e94cae291"),
    ),
    *_of(
        "commonsense_reasoning",
        ("copa", "copa", "choice", 0, 0.5, "595dca44dec54c84"),
        ("siqa", "siqa", "choice", 3, 0.5, "2722a2c30a08dfae"),
        ("commonsense_qa", "commonsense_qa", "choice", 0, 0.25, "2771f63f8127c072"),
        ("piqa", "piqa", "choice", 0, 0.5, "d2870e73aec5154d", UNKNOWN, _ANSWER),
        ("openbook_qa", "openbook_qa", "choice", 10, 0.25, "adb2e5c7f8db810d"),
        ("bigbench_strange_stories", "bigbench_strange_stories", "choice", 0, 0.5, "366cb6426096629b", _BIG_BENCH),
        ("bigbench_strategy_qa", "bigbench_strategy_qa", "choice", 0, 0.5, "b550289adc9304c9", _BIG_BENCH),
    ),
    *_of(
        "language_understanding",
        ("lambada_openai", "lambada_openai", "exact", 0, 0.0, "411bfbe5b9054346"),
        ("hellaswag", "hellaswag", "choice", 0, 0.25),
        ("winograd", "winograd_wsc", "schema", 3, 0.5, "746336c27cd2e39a"),
        ("winogrande", "winogrande", "schema", 5, 0.5, "ea1592526f3bfdd0"),
    ),
    *_of(
        "symbolic_problem_solving",
        ("bigbench_elementary_math_qa", "bigbench_elementary_math_qa", "choice", 1, 0.25, None, _BIG_BENCH),
        ("bigbench_dyck_languages", "bigbench_dyck_languages", "exact", 5, 0.0, "106ba9ac7507c7ab", _BIG_BENCH),
        ("bigbench_operators", "bigbench_operators", "exact", 3, 0.0, "41e2964ad619c49e", _BIG_BENCH),
        ("simple_arithmetic_withspaces", "simple_arithmetic_withspaces", "exact", 5, 0.0, "eb95a1440f1824c3"),
        ("simple_arithmetic_nospaces", "simple_arithmetic_nospaces", "exact", 5, 0.0, "2b68696de9e381e9"),
        ("gsm8k", "gsm8k_prepended_8shot", "generation", 0, 0.0, "c4b1b7378385b1c4", UNKNOWN, _REASONING),
        (
            *("svamp", "svamp", "generation", 5, 0.0, "6e9d75302c2663a8", UNKNOWN),
            {**_REASONING, "prelimiter": "Question: "},
        ),
        ("agi_eval_lsat_ar", "agi_eval_lsat_ar", "choice", 5, 0.25, "9ffd73480b51746c"),
    ),
    *_of(
        "reading_comprehension",
        ("squad", "squad", "exact", 3, 0.0, None, "CC BY-SA 4.0"),
        ("boolq", "boolq", "choice", 0, 0.5, "454ff101e614370b", "CC BY-SA 3.0", _ANSWER),
        ("coqa", "coqa", "exact", 0, 0.0),
        ("agi_eval_lsat_rc", "agi_eval_lsat_rc", "choice", 5, 0.25, "8f67ecf0e760a8fc"),
        ("agi_eval_lsat_lr", "agi_eval_lsat_lr", "choice", 5, 0.25, "e4a273cf9d7013b4"),
        ("agi_eval_sat_en", "agi_eval_sat_en", "choice", 5, 0.25, "cb78f595cd4cbd22"),
    ),
    *_of(
        "programming",
        ("human_eval", "human_eval", "code", 0, 0.0, "a0eb83f052f2ad70", "MIT"),
        ("human_eval_cpp", "processed_human_eval_cpp", "code", 0, 0.0, "f21df5f13168e087"),
        ("human_eval_js", "processed_human_eval_js", "code", 0, 0.0, "de1b52b742622de5"),
        ("human_eval_return_simple", "human_eval_return_simple", "code", 0, 0.0, "6c921b573b69eba3"),
        ("human_eval_return_complex", "human_eval_return_complex", "code", 0, 0.0, "e3a732c2e79a7941"),
        ("human_eval_25", "human_eval-0.25", "code", 0, 0.0, "79d4dee7372117ed"),
        ("human_eval_50", "human_eval-0.5", "code", 0, 0.0, "eb2a3ac74f5d8e57"),
        ("human_eval_75", "human_eval-0.75", "code", 0, 0.0, "9651a7ee8206c9cb"),
    ),
)
BY_NAME = {benchmark.name: benchmark for benchmark in BENCHMARKS}
