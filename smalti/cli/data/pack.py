"""``smalti data pack``: writes the best-fit index of a folder of tokens."""

from typing import Annotated

import typer

from smalti.cli.data.arguments import Fields, Json, TextTokenizer, open_folder


def pack(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Token files, or any local format that a run reads.")],
    fields: Fields = None,
    *,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens in a sequence.")],
    tokenizer: TextTokenizer = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the comparison with concat.")] = False,
    as_json: Json = False,
) -> None:
    """Pack documents into sequences so that only longer ones are cut: writes the index for data.packing=best-fit.

    Reads all tokens once and writes FOLDER/packs/SEQ_LEN, one index for each length; the tokens are not changed.
    Running it again replaces the index with an identical one.
    """
    from smalti.base.units import format_frac
    from smalti.cli.tables import print_json, table
    from smalti.data.pack.build import pack_source
    from smalti.data.pack.index import pack_folder

    packing = pack_source(open_folder(folder, fields or [], tokenizer), seq_len)
    figures = packing.as_json()
    if not dry_run:
        packing.write()
    if as_json:
        print_json({"dry_run": dry_run, **figures})
        return
    rows = [
        (name, f"{figures[f'{key}_sequences']:,}", format_frac(figures[f"{key}_cut_frac"]), f"{padding:.4%}")
        for name, key, padding in (
            ("concat", "concat", 0.0),
            ("best-fit", "best_fit", figures["best_fit_padding_frac"]),
        )
    ]
    print(f"{figures['documents']:,} documents, {figures['tokens']:,} tokens, sequences of {seq_len:,}")
    print(table(("packing", "sequences", "documents cut", "padding"), rows))
    print(f"a best-fit sequence has {figures['pieces_per_sequence']:.1f} pieces on average")
    if dry_run:
        print("nothing was written; without --dry-run the index goes to " + pack_folder(folder, seq_len))
    else:
        print(f"written to {pack_folder(folder, seq_len)}; train with data.packing=best-fit data.seq_len={seq_len}")
