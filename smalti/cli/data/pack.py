"""``smalti data pack``: the best-fit index of a folder of tokens."""

from typing import Annotated

import typer

from smalti.cli.data.source import Fields, TokenizerOfText, open_folder


def pack(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Token files, or any local form that a run reads.")],
    fields: Fields = None,
    *,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens in a sequence.")],
    tokenizer: TokenizerOfText = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only compare with concat; nothing is written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Pack documents into sequences, so that none is cut that fits into one: the index for data.packing=best-fit.

    Reads all tokens once, and writes FOLDER/packs/SEQ_LEN; the tokens stay as they are, and may have an index for each
    of many lengths. The same command again replaces the index with the same.
    """
    from smalti.base.units import format_frac
    from smalti.cli.tables import print_json, table
    from smalti.data.pack.build import pack_source
    from smalti.data.pack.index import pack_folder

    packing = pack_source(open_folder(folder, fields or [], tokenizer), seq_len)
    found = packing.as_json()
    if not dry_run:
        packing.write()
    if as_json:
        print_json({"dry_run": dry_run, **found})
        return
    rows = [
        (name, f"{found[f'{key}_sequences']:,}", format_frac(found[f"{key}_cut_frac"]), f"{padding:.4%}")
        for name, key, padding in (
            ("concat", "concat", 0.0),
            ("best-fit", "best_fit", found["best_fit_padding_frac"]),
        )
    ]
    print(f"{found['documents']:,} documents, {found['tokens']:,} tokens, sequences of {seq_len:,}")
    print(table(("packing", "sequences", "documents cut", "padding"), rows))
    print(f"a best-fit sequence holds {found['pieces_per_sequence']:.1f} pieces in the mean")
    if dry_run:
        print("nothing was written; without --dry-run the index goes to " + pack_folder(folder, seq_len))
    else:
        print(f"written to {pack_folder(folder, seq_len)}; train with data.packing=best-fit data.seq_len={seq_len}")
