"""Commands that are planned and not implemented yet, each with the nearest alternative."""

NOT_YET = {
    "tune rl": None,
    "tune synth": None,
    "bench": "smalti serve MODEL; its /metrics counts time to the first token, time per token and tokens",
    "quantize": "smalti serve MODEL --dtype bf16 halves the weights",
    "console": "smalti runs report RUN writes a run's page; smalti runs ls lists the runs",
    "plan ladder": "smalti plan budget gives parameters and tokens by published laws",
    "plan fit": "smalti plan budget gives parameters and tokens by published laws",
    "plan predict": "smalti plan budget gives the loss by published laws",
    "data explore": "smalti data documents and smalti data inspect show what is there",
    "data ls": "smalti data inspect FOLDER shows one folder of token files",
    "eval judge": None,
    "eval arena": None,
    "runs sweep": "smalti fleet launch RECIPE --sweep a.b=VALUE,VALUE queues a run for each; smalti runs diff compares",
    "runs branch": "smalti train RECIPE.yaml a.b=value --fork changes a run from its newest checkpoint on",
}
"""``VERB`` or ``VERB COMMAND`` -> what to use instead; None: there is no alternative."""


def planned(arguments: list[str]) -> str | None:
    """Return the entry of ``NOT_YET`` that a command line begins with."""
    return next((name for name in (" ".join(arguments[:2]), arguments[0]) if name in NOT_YET), None)
