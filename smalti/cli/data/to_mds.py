"""``smalti data to-mds``: writes tokens as an MDS data set for mosaicml-streaming."""

from typing import Annotated

import typer

from smalti.cli.data.arguments import Fields, Json, TextTokenizer, open_folder
from smalti.cli.progress import ProgressLine


def to_mds(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Token files, or any format that a run reads.")],
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="New folder for index.json and shards.")],
    fields: Fields = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a sample; absent: a sample is a document.")
    ] = None,
    tokenizer: TextTokenizer = None,
    column: Annotated[str, typer.Option(help="Name of the column.")] = "tokens",
    dtype: Annotated[
        str | None,
        typer.Option(
            help="dtype in the shards: uint16, int32, uint32 or int64; absent: uint16 if ids fit, else int32, or "
            "uint32 if the vocabulary is unknown. The dtype of the tokens read is the field dtype=."
        ),
    ] = None,
    compression: Annotated[str | None, typer.Option(help="zstd or zstd:LEVEL; absent: none.")] = None,
    hashes: Annotated[str, typer.Option(help="Hashes of every file, separated by commas; '' for none.")] = "sha1",
    shard_bytes: Annotated[int, typer.Option(help="Size of a shard before compression.")] = 1 << 26,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be written.")] = False,
    as_json: Json = False,
) -> None:
    """Write tokens as an MDS data set, which mosaicml-streaming's StreamingDataset reads.

    Samples are in the order of the tokens. With --seq-len, tokens that do not fill a last sample are left out, and
    their number is printed.
    """
    from dataclasses import asdict
    from typing import cast, get_args

    from smalti.base.errors import UserError
    from smalti.base.units import format_bytes
    from smalti.cli.tables import pairs, print_json
    from smalti.data.sources.mds_writer import MdsDtype, MdsOptions, plan_mds, write_mds

    if dtype is not None and dtype not in get_args(MdsDtype):
        raise UserError(f"--dtype {dtype} is not known", allowed=", ".join(get_args(MdsDtype)))
    names = tuple(name for name in hashes.replace(" ", "").split(",") if name)
    options = MdsOptions(seq_len, column, cast(MdsDtype | None, dtype), compression, names, shard_bytes)
    source = open_folder(folder, fields or [], tokenizer)
    if dry_run:
        report = plan_mds(source, options)
    else:
        with ProgressLine("tokens") as progress:
            report = write_mds(source, output, options, progress)
    if as_json:
        print_json({"output": output, "dry_run": dry_run, **asdict(report)})
        return
    rows = [
        ("samples", f"{report.samples:,}" if report.samples_known else "as many as documents"),
        ("tokens", f"{report.tokens:,} as {report.dtype}"),
        ("left out at the end", f"{report.left_out_tokens:,} tokens"),
    ]
    if not dry_run:
        rows += [("shards", f"{report.shards:,}"), ("on disk", format_bytes(report.n_bytes))]
    print(pairs(rows))
    if dry_run:
        print(f"nothing was written; without --dry-run the data set goes to {output}")
    else:
        print(f"written to {output}; read it with StreamingDataset(local='{output}', batch_size=...)")
