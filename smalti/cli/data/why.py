"""``smalti data why``: what a build did to one document."""

from typing import Annotated, Any

import typer

from smalti.cli.data.arguments import Json
from smalti.cli.extras import need_data_extra


def why(
    document: Annotated[str, typer.Argument(metavar="DOC", help="The id of a document, or SOURCE/ID.")],
    folder: Annotated[str, typer.Argument(metavar="[BUILD]", help="The output of a build.")] = ".",
    work: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="The folder 'work' of the recipe, if it has one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print whether a build kept a document, by which step and rule it was dropped, with score and limit, what it is a
    duplicate of, and what was edited.

    The scores of all rules and the edits come from the steps of the build, which are kept beside its output until the
    next build of the same name.
    """
    from smalti.cli.tables import print_json

    need_data_extra()
    from smalti.data.build.why import why as explain

    fates = explain(folder, document, work)
    if as_json:
        print_json(fates)
        return
    print("\n\n".join(_text(fate) for fate in fates))


def _text(fate: dict[str, Any]) -> str:
    from smalti.cli.tables import pairs, table

    facts = [("document", f"{fate['source']}/{fate['id']}"), ("split", fate["split"])]
    if fate["kept"]:
        facts.append(("result", f"kept, {fate['n_bytes']:,} bytes"))
        losers = fate["kept_instead_of"]
        if losers["documents"]:
            names = ", ".join(f"{row['source']}/{row['id']} ({row['rule']})" for row in losers["examples"])
            facts.append((f"kept instead of {losers['documents']:,}", names))
    else:
        facts += [("result", f"dropped by {fate['step']}"), ("rule", fate["rule"]), ("reason", fate["reason"] or "")]
        if fate["score"] is not None:
            facts.append(("score", f"{fate['score']:.6g}; kept: {_range(fate['limit'])}"))
        facts += [("duplicate of", _partner(partner)) for partner in fate["partners"]]
    measured = fate["measured"]
    if measured is None:
        if fate.get("step") == "extract":
            return pairs(facts)
        note = "note: the steps of this build are gone, or the id is not unique: no scores of other rules and no edits"
        return f"{pairs(facts)}\n{note}"
    facts += _measured(measured)
    blocks = [pairs(facts)]
    if measured["rules"]:
        rows = [
            (rule["rule"], f"{rule['score']:.6g}", _range(rule), "yes" if rule["passes"] else "no")
            for rule in measured["rules"]
        ]
        blocks.append(table(("rule", "score", "kept", "passes"), rows))
    if fate.get("edits", {}).get("changes"):
        blocks.append(_edits(fate["edits"]))
    return "\n\n".join(blocks)


def _measured(measured: dict[str, Any]) -> list[tuple[str, str]]:
    kind = ", ".join(filter(None, (measured["kind"], measured["encoding"])))
    facts = [("read", f"{kind}, {measured['n_raw_bytes']:,} bytes")]
    if measured["language"] is not None:
        facts.append(("language", f"{measured['language']} {measured['language_score']:.3g}"))
    if measured["quality"] is not None:
        facts.append(("quality", f"{measured['quality']:.3g}"))
    if measured["pii"]:
        facts.append(("personal data", ", ".join(f"{kind} {count:,}" for kind, count in measured["pii"].items())))
    if measured["evaluation"] is not None:
        facts.append(("shares 13 words with", measured["evaluation"]))
    return facts


def _edits(edits: dict[str, Any]) -> str:
    lines = [f"edits: {edits['changes']:,}, from {edits['bytes_before']:,} to {edits['bytes_after']:,} bytes"]
    for change in edits["examples"]:
        lines.append(f"  {_quoted(change['before'])} -> {_quoted(change['after'])}")
    if len(edits["examples"]) < edits["changes"]:
        lines.append(f"  and {edits['changes'] - len(edits['examples']):,} more")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    # Of a document: what a terminal would obey is escaped.
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) or "(nothing)"


def _partner(partner: dict[str, Any]) -> str:
    fate = "kept" if partner["kept"] else f"dropped by {partner['rule']}"
    return f"{partner['source']}/{partner['id']} ({partner['split']}, {fate})"


def _range(limit: dict[str, Any]) -> str:
    low, high = limit["low"], limit["high"]
    if low is None:
        return "any" if high is None else f"up to {high:g}"
    return f"from {low:g}" if high is None else f"{low:g} to {high:g}"
