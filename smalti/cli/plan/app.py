"""``smalti plan``: predicts what a run needs before it starts, and compares with it afterwards. One file a command."""

import typer

from smalti.cli.plan.budget import budget
from smalti.cli.plan.data import data
from smalti.cli.plan.failures import failures
from smalti.cli.plan.flops import flops
from smalti.cli.plan.hardware import hardware
from smalti.cli.plan.layout import layout
from smalti.cli.plan.memory import memory
from smalti.cli.plan.phases import phases
from smalti.cli.plan.scaling import scaling
from smalti.cli.plan.serving import serving
from smalti.cli.plan.time import time
from smalti.cli.plan.tuning import tuning
from smalti.cli.plan.verify import verify

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Parameters, FLOPs, memory and time of a run before it starts.",
)
app.command(
    short_help="From the known quantities of a run, all that follow.",
    epilog="Example: smalti plan budget gpu=h100-sxm gpus=512 days=30 --plot budget.svg",
)(budget)
app.command(
    short_help="Cost of pretraining, curriculum, fine-tuning, preference.",
    epilog="Example: smalti plan phases model=mpt-7b gpu=h100-sxm cost_usd=1e6",
)(phases)
app.command(
    short_help="FLOPs and predicted time of a run.",
    epilog="Example: smalti plan time demo train.duration=2000step --json",
)(time)
app.command(
    short_help="Peak bytes of one rank.",
    epilog="Example: smalti plan memory demo train.parallel.ranks=8 --gpu 'H100 SXM'",
)(memory)
app.command(
    short_help="Epochs of each source, and the cost of reading.",
    epilog="Example: smalti plan data recipe.yaml --tokens code=464e9 --tokens prose=4.87e9",
)(data)
app.command(
    short_help="Compare the plan with what a run measured.", epilog="Example: smalti plan verify runs/demo --within 1.5"
)(verify)
app.command(
    short_help="Memory and speed of serving a model.",
    epilog="Example: smalti plan serving dbrx-132b --weights q4_k_s --context 4096",
)(serving)
app.command(
    short_help="Memory of full tuning, LoRA, QLoRA and DPO.",
    epilog="Example: smalti plan tuning llama-3-8b --method qlora --rank 64 --gpu rtx4090",
)(tuning)
app.command(
    short_help="Known devices, or a measurement of this machine.",
    epilog="Example: smalti plan hardware h100-sxm --json",
)(hardware)
app.command(
    short_help="Failures, checkpoint interval, goodput, spare nodes.",
    epilog="Example: smalti plan failures gpus=3072 days=75 restart_s=120 --simulate",
)(failures)
app.command(
    short_help="FLOPs of a token by convention; convert an MFU.",
    epilog="Example: smalti plan flops mpt-7b --seq-len 2048 --mfu 0.507 --from llm-foundry",
)(flops)
app.command(
    short_help="The fastest layouts on a number of devices.",
    epilog="Example: smalti plan layout dbrx-132b --gpu h100-sxm --gpus 3072",
)(layout)
app.command(
    short_help="Predicted speed on growing numbers of devices.",
    epilog="Example: smalti plan scaling dbrx-132b --gpus 64,512,3072 --plot curve.svg",
)(scaling)
