"""LLM Foundry's evaluation, written plainly and slowly from its formulas: the reference of the mode v0.3.

It reads the raw rows, calls the model once for each option without a batch or a cache, and knows nothing of
``smalti.evals``.
"""

import json
import random
import string
from pathlib import Path

import torch
import torch.nn.functional as F

COT = {"cot": "The answer is ", "delimiter": "\n\nA:", "stops": ["\n\n", "Question:"], "normalize": False}
TASKS = {
    # name: (file, type, shots, chance, what differs from the defaults)
    "jeopardy": ("world_knowledge/jeopardy_all", "LM", 3, 0, {"delimiter": "\nAnswer: ", "categories": True}),
    "arc_easy": ("world_knowledge/arc_easy", "MC", 3, 0.25, {"delimiter": "\nAnswer: "}),
    "winogrande": ("language_understanding/winogrande", "Schema", 5, 0.5, {}),
    "triviaqa_sm_sub": ("world_knowledge/triviaqa_sm_sub", "Gen", 3, 0, {"normalize": True}),
    "svamp": ("symbolic_problem_solving/svamp", "Gen", 5, 0, {**COT, "prelimiter": "Question: "}),
    "lambada_openai": ("language_understanding/lambada_openai", "LM", 0, 0, {}),
    "bigbench_qa_wikidata": ("world_knowledge/bigbench_qa_wikidata", "LM", 3, 0, {}),
    "arc_challenge": ("world_knowledge/arc_challenge", "MC", 3, 0.25, {"delimiter": "\nAnswer: "}),
    "copa": ("commonsense_reasoning/copa", "MC", 0, 0.5, {}),
    "siqa": ("commonsense_reasoning/siqa", "MC", 3, 0.5, {}),
    "commonsense_qa": ("commonsense_reasoning/commonsense_qa", "MC", 0, 0.25, {}),
    "piqa": ("commonsense_reasoning/piqa", "MC", 0, 0.5, {"delimiter": "\nAnswer: "}),
    "openbook_qa": ("commonsense_reasoning/openbook_qa", "MC", 10, 0.25, {}),
    "bigbench_strange_stories": ("commonsense_reasoning/bigbench_strange_stories", "MC", 0, 0.5, {}),
    "bigbench_strategy_qa": ("commonsense_reasoning/bigbench_strategy_qa", "MC", 0, 0.5, {}),
    "winograd": ("language_understanding/winograd_wsc", "Schema", 3, 0.5, {}),
    "bigbench_dyck_languages": ("symbolic_problem_solving/bigbench_dyck_languages", "LM", 5, 0, {}),
    "bigbench_operators": ("symbolic_problem_solving/bigbench_operators", "LM", 3, 0, {}),
    "simple_arithmetic_withspaces": ("symbolic_problem_solving/simple_arithmetic_withspaces", "LM", 5, 0, {}),
    "simple_arithmetic_nospaces": ("symbolic_problem_solving/simple_arithmetic_nospaces", "LM", 5, 0, {}),
    "gsm8k": ("symbolic_problem_solving/gsm8k_prepended_8shot", "Gen", 0, 0, COT),
    "agi_eval_lsat_ar": ("symbolic_problem_solving/agi_eval_lsat_ar", "MC", 5, 0.25, {}),
    "boolq": ("reading_comprehension/boolq", "MC", 0, 0.5, {"delimiter": "\nAnswer: "}),
    "agi_eval_lsat_rc": ("reading_comprehension/agi_eval_lsat_rc", "MC", 5, 0.25, {}),
    "agi_eval_lsat_lr": ("reading_comprehension/agi_eval_lsat_lr", "MC", 5, 0.25, {}),
    "agi_eval_sat_en": ("reading_comprehension/agi_eval_sat_en", "MC", 5, 0.25, {}),
}


def rows_of(path):
    lines = Path(path).read_bytes().decode().split("\n")
    return [json.loads(line) for line in lines if line]


def stripped(row):
    return {key: value.strip() if isinstance(value, str) else value for key, value in row.items()}


def parts_of(rows, settings):
    """The sub-categories, each a data set of its own."""
    if not settings.get("categories"):
        return [rows]
    return [[row for row in rows if row["category"] == name] for name in sorted({row["category"] for row in rows})]


def drawn(n, shots, index, rng):
    chosen = set(rng.sample(range(n), min(n - 1, shots)))
    if index in chosen:
        chosen.remove(index)
        if len(chosen) >= n - 1:
            return chosen
        new = rng.choice(range(n))
        while new in chosen or new == index:
            new = rng.choice(range(n))
        chosen.add(new)
    return chosen


def prompts(rows, kind, shots, settings, limit):
    """(text of the shots, row) of the first ``limit`` rows."""
    rng = random.Random(1234)
    for index, row in enumerate(rows[:limit]):
        text = ""
        if shots:
            for other in drawn(len(rows), shots, index, rng):
                text += example(rows[other], kind, settings, text, answer=True)
        yield text, row


def example(row, kind, settings, before, *, answer):
    delimiter, prelimiter = settings.get("delimiter", " "), settings.get("prelimiter", "")
    if kind == "MC":
        context, right = row["query"], row["choices"][row["gold"]]
    elif kind == "Schema":
        context, right = row["context_options"][row["gold"]], row["continuation"]
    elif kind == "LM":
        context, right = row["context"], row["continuation"]
    else:
        context, right = row["context"], row["answer"]
        if "chain_of_thought" in row:
            right = row["chain_of_thought"] + settings.get("cot", "") + right
    newline = "\n" if before else ""
    return newline + prelimiter + context + delimiter + (right if answer else "")


def options_of(text, row, kind, settings):
    """(context, continuation) of each option."""
    if kind == "Schema":
        delimiter = settings.get("delimiter", " ").rstrip()
        return [
            (f"\n{context}{delimiter}" if text else context, row["continuation"]) for context in row["context_options"]
        ]
    context = example(row, kind, settings, text, answer=False).rstrip()
    return [(context, right) for right in (row["choices"] if kind == "MC" else [row["continuation"]])]


class Reference:
    def __init__(self, model, tokenizer, specials, max_seq_len):
        self.model, self.encode, self.specials, self.max_seq_len = model, tokenizer.encode, list(specials), max_seq_len
        self.needs_space = len(tokenizer.encode(" a")) == 1

    def logits_and_targets(self, text, context, continuation):
        if self.needs_space and not continuation.startswith(" "):
            continuation = " " + continuation
        before = self.specials + self.encode(text) + self.encode(context)
        after = self.encode(continuation)
        if len(before) + len(after) > self.max_seq_len:
            before = before[-(self.max_seq_len - len(after)) :]
        ids = torch.tensor(before + after)
        with torch.no_grad():
            logits = self.model(ids[None]).value[0].float()
        return logits[len(before) - 1 : len(ids) - 1], ids[len(before) :]

    def likelihood_results(self, rows, kind, shots, settings, limit):
        """For each item: the mean cross-entropies of its options, and whether it is right."""
        results = []
        for text, row in prompts([stripped(row) for row in rows], kind, shots, settings, limit):
            pairs = [self.logits_and_targets(text, *pair) for pair in options_of(text, row, kind, settings)]
            losses = [float(F.cross_entropy(*pair)) for pair in pairs]
            if kind == "LM":
                right = bool((pairs[0][0].argmax(-1) == pairs[0][1]).all())
            else:
                right = losses.index(min(losses)) == row["gold"]
            results.append((losses, right))
        return results

    def generation_requests(self, rows, shots, settings, limit):
        """(prompt ids, right answers) of each item, and the longest answer in tokens."""
        longest = 0
        for row in rows:
            reasoning = row["chain_of_thought"] + settings.get("cot", "") if "chain_of_thought" in row else ""
            for answer in {row["answer"], *row.get("aliases", [])}:
                longest = max(longest, len(self.specials) + len(self.encode(reasoning + answer)))
        longest += 10 if settings.get("cot") else 0
        requests = []
        room = self.max_seq_len - longest
        for text, row in prompts([stripped(row) for row in rows], "Gen", shots, settings, limit):
            context = example(row, "Gen", settings, text, answer=False).rstrip()
            ids = self.specials + self.encode(text) + self.encode(context)
            requests.append((ids[-room:] if len(ids) > room else ids, [row["answer"], *row.get("aliases", [])]))
        return requests, longest


def normalized(text):
    text = text.replace("_", " ").lower()
    marks = set(string.punctuation) | set("‘’´`")  # noqa: RUF001
    text = "".join(" " if character in marks else character for character in text)
    return " ".join(word for word in text.split() if word not in ("a", "an", "the"))


def is_right(text, answers, settings):
    for stop in settings.get("stops", []):
        text = text.split(stop)[0]
    if settings.get("cot"):
        text = text.split(settings["cot"])[-1]
    clean = normalized if settings.get("normalize", True) else str.strip
    return any(clean(text).startswith(clean(answer)) for answer in answers)
