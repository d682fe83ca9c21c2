"""``smalti data classifier``: train a quality classifier on good and bad documents."""

from typing import Annotated, Any

import typer

from smalti.cli.extras import need
from smalti.cli.options import Json

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Train quality classifiers.")


@app.callback()
def _classifier() -> None:
    """Train quality classifiers."""


@app.command(epilog="Example: smalti data classifier train --good data/good --bad data/bad --output quality.npz")
def train(
    good: Annotated[str, typer.Option(metavar="PATH", help="File or folder of documents to keep.")],
    bad: Annotated[str, typer.Option(metavar="PATH", help="File or folder of documents to drop.")],
    output: Annotated[str, typer.Option(metavar="FILE.npz", help="The classifier.")],
    text_field: Annotated[str, typer.Option(help="Field with the text, in JSONL and Parquet.")] = "text",
    seed: Annotated[int, typer.Option(min=0, help="Decides the held-out documents and the order of training.")] = 17,
    as_json: Json = False,
) -> None:
    """Train a linear classifier on hashed n-grams of words and characters, and measure it on held-out documents.

    AUC: how often a good document scores above a bad one; 0.5 is chance. Scores are probabilities, calibrated on
    other documents than those of training and of the measurement. The same documents and seed give the same file.
    """
    from smalti.base.errors import UserError
    from smalti.cli.progress import ProgressLine
    from smalti.cli.tables import print_json

    if not output.endswith(".npz"):
        raise UserError(f"--output {output} is not an .npz file", allowed="a file whose name ends with .npz")
    need("data", "smalti data", "pyarrow")
    from smalti.data.prepare.classifier.train import train_classifier

    with ProgressLine() as progress:
        classifier = train_classifier(good, bad, text_field=text_field, seed=seed, progress=progress)
    classifier.save(output)
    values = classifier.report | {"digest": classifier.digest, "output": output}
    print_json(values) if as_json else print(_text(values))


def _text(values: dict[str, Any]) -> str:
    from smalti.cli.tables import pairs, table

    low, high = values["auc_interval"]
    facts = pairs(
        [
            ("documents", f"{values['good_documents']:,} good, {values['bad_documents']:,} bad"),
            ("held out", f"{values['heldout_documents']:,}"),
            ("AUC", f"{values['auc']:.4f} ({low:.4f} to {high:.4f})"),
            ("calibration error", f"{values['calibration_error']:.4f}"),
            ("digest", values["digest"][:16]),
        ]
    )
    rows = [
        (f"{row['from']:.1f}", f"{row['documents']:,}", f"{row['mean_score']:.3f}", f"{row['good_frac']:.3f}")
        for row in values["reliability"]
    ]
    reliability = table(("score from", "documents", "mean score", "of them good"), rows)
    lines = [facts, "", "reliability, on held-out documents", reliability]
    if low <= 0.5 <= high:
        lines += ["", "note: no difference between good and bad documents is shown: the interval of the AUC holds 0.5"]
    return "\n".join([*lines, "", f"written to {values['output']}"])
