"""Cost of training: the tables of prices, and the speed-up of more GPUs."""

from collections.abc import Iterator
from functools import partial

from talks import arithmetic as plan
from talks.rows import Cell, Figure, Section, Table

# fmt: off
_GPT = (  # line, model, parameters, tokens, days, cost; what days and cost imply: MFU, price. All of 256 A100s
    (48, "GPT-1.3B", 1.3e9, "26B", "0.14", "$2,000", "21.0%", "$2.33"),
    (49, "GPT-2.7B", 2.7e9, "54B", "0.48", "$6,000", "26.4%", "$2.03"),
    (50, "GPT-6.7B", 6.7e9, "134B", "2.32", "$30,000", "33.6%", "$2.10"),
    (51, "GPT-13B", 13e9, "260B", "7.43", "$100,000", "39.6%", "$2.19"),
    (52, "GPT-30B *", 30e9, "610B", "35.98", "$450,000", "44.2%", "$2.04"),
    (53, "GPT-70B **", 70e9, "1400B", "176.55", "$2,500,000", "48.3%", "$2.30"),
)
_TUNED = (  # line, name, model, tokens, rows, length of a row, GPUs, card, hours, as printed, cost, and what follows:
            # steps, price; "" where nothing was printed
    (247, "MPT-7B", "1T", 1760, 2048, 440, "40GB", 9.5 * 24, "9.5 Days", "$200,640", "277,433 steps", "$2.00"),
    (248, "MPT-7B-Instruct", "9.6M", 48, 2048, 8, "40GB", 2.3, "2.3 Hours", "$37", "98 steps", "$2.01"),
    (249, "MPT-7B-Chat", "86M", 32, 2048, 8, "80GB", 8.2, "8.2 Hours", "$164", "1,312 steps", "$2.50"),
    (250, "MPT-7B-Chat, then", "", 0, 0, 32, "40GB", 6.7, "6.7 Hours", "$429", "", "$2.00"),
    (252, "MPT-7B-StoryWriter-65k+", "5B", 32, 65536, 32, "80GB", 2.2 * 24, "2.2 Days", "$4270", "2,384 steps",
     "$2.53"),
)
_THIRTY = (  # line, GPUs, card, tokens, days, as printed, cost, what follows: MFU and price
    (291, 512, "a100-40gb", 1e12, 28.3, "28.3 Days", "$871,000", "46.1%", "$2.50"),
    (292, 512, "h100-sxm", 1e12, 11.6, "11.6 Days", "$714,000", "35.5%", "$5.01"),
    (295, 16, "a100-40gb", 1e9, 21.8 / 24, "21.8 Hours", "$871", "45.9%", "$2.50"),
    (296, 16, "h100-sxm", 1e9, 8.9 / 24, "8.9 Hours", "$714", "35.5%", "$5.01"),
)
# fmt: on


def _usd(text: str) -> float:
    return float(text.removeprefix("$").replace(",", ""))


def _gpt_rows() -> Iterator[tuple[Cell, ...]]:
    cell = partial(Figure, "mpt", "LLM Training Costs on MosaicML Cloud")
    for line, name, params, tokens, days, cost, mfu, price in _GPT:
        taken, spent, key = float(tokens[:-1]) * 1e9, float(days), name.split()[0].lower()
        head, twenty = "Billions of Tokens (Compute-optimal)", partial(plan.chinchilla_tokens, params)
        if key == "gpt-30b":
            why = "20 x 30B is 600B; 610B are 20 for each of 30.5B parameters"
            optimal = cell(f"{key}-tokens", line, head, tokens, twenty, "20N", "wrong", why, "600B")
        else:
            optimal = cell(f"{key}-tokens", line, head, tokens, twenty, "20N")
        of_days = partial(plan.mfu, params, taken, 256, "a100-40gb", spent)
        of_cost = partial(plan.usd_per_gpu_hour, _usd(cost), 256, spent)
        yield (
            name,
            optimal,
            cell(f"{key}-days", line, "Days to Train", days, of_days, "6ND / 256 A100s", "theirs", right=mfu),
            cell(f"{key}-cost", line, "Approx. Cost", cost, of_cost, "cost / GPU-hours", "theirs", right=price),
        )


def _tuned_rows() -> Iterator[tuple[Cell, ...]]:
    cell = partial(Figure, "mpt", "MPT-7B Training Costs")
    for line, name, tokens, rows, seq_len, gpus, card, hours, time, cost, steps, price in _TUNED:
        key, of_cost = name.lower().replace(", ", "-"), partial(plan.usd_per_gpu_hour, _usd(cost), gpus, hours / 24)
        batch: Cell = "-"
        if tokens:
            taken = float(tokens[:-1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[tokens[-1]]
            of_batch = partial(plan.steps, taken, rows * seq_len)
            batch = cell(f"{key}-steps", line, f"{rows} x {seq_len}", f"{rows} x {seq_len}", of_batch,
                         "tokens / batch", "theirs", right=steps)  # fmt: skip
        bill = cell(f"{key}-cost", line, f"{time} {cost}", cost, of_cost, "cost / GPU-hours", "theirs", right=price)
        yield name, tokens or "-", batch, f"{gpus} x A100-{card}", time, bill


def _thirty_rows() -> Iterator[tuple[Cell, ...]]:
    cell = partial(Figure, "mpt", "How much LLMs really cost")
    for line, gpus, gpu, tokens, days, time, cost, mfu, price in _THIRTY:
        key = f"mpt-30b-{'run' if tokens == 1e12 else 'tune'}-{gpu.split('-')[0]}"
        of_days = partial(plan.mfu, 30e9, tokens, gpus, gpu, days)
        of_cost = partial(plan.usd_per_gpu_hour, _usd(cost), gpus, days)
        yield (
            f"{gpus} x {'A100-40GB' if gpu.startswith('a') else 'H100-80GB'}",
            "1 trillion" if tokens == 1e12 else "1B",
            cell(f"{key}-time", line, time, time, of_days, "6ND / GPUs", "theirs", right=mfu),
            cell(f"{key}-cost", line, cost, cost, of_cost, "cost / GPU-hours", "theirs", right=price),
        )


# fmt: off
_mpt = partial(Figure, "mpt", "MPT-7B Training Costs")
_ALONE = (
    _mpt("mpt-7b-mfu-7b", 247, "MPT-7B 1T 440xA100-40GB 9.5 Days", "9.5 Days",
         lambda: plan.mfu(7e9, 1e12, 440, "a100-40gb", 9.5), "6 x 7e9 x 1e12 / (440 A100s x 9.5 days)", "theirs", "",
         "MFU 37.3%"),
    _mpt("mpt-7b-mfu", 247, "MPT-7B 1T 440xA100-40GB 9.5 Days", "9.5 Days",
         lambda: plan.mfu(plan.params("mpt-7b").total, 1e12, 440, "a100-40gb", 9.5),
         "the same with its 6.65e9 parameters", "theirs", "", "MFU 35.4%"),
    _mpt("mpt-7b-bill", 247, "440xA100-40GB 9.5 Days $200,640", "$200,640", lambda: plan.cost(440, 9.5, 2.00),
         "100,320 GPU-hours x $2.00"),
    _mpt("mpt-7b-chat-hours", 251, "Total Combined: 14.9 Hours", "14.9", lambda: 8.2 + 6.7, "8.2 + 6.7 hours"),
    _mpt("mpt-7b-chat-bill", 251, "Total Combined: $593", "$593",
         lambda: plan.cost(8, 8.2 / 24, 2.50) + plan.cost(32, 6.7 / 24, 2.00),
         "65.6 GPU-hours x $2.50 + 214.4 x $2.00"),
    _mpt("mpt-7b-storywriter-bill", 252, "32xA100-80GB 2.2 Days $4270", "$4,270", lambda: plan.cost(32, 2.2, 2.50),
         "1,690 GPU-hours x $2.50", "about", "2.2 days are rounded: $4,270 are 2.22 days", "$4,224", within=96),
    Figure("mpt", "How much LLMs really cost", "a100-40gb-price", 291, "512xA100-40GB ... 28.3 Days ~ $871,000",
           "$871,000", lambda: plan.cost(512, 28.3, 2.00), "347,750 GPU-hours x $2.00", "wrong",
           "the talk's other table has the 40 GB card at $2.00 an hour and the 80 GB card at $2.50; this one takes "
           "$2.50 and says 40 GB, for pretraining and for fine-tuning", "$696K"),
    Figure("mpt", "LLM Training Costs on MosaicML Cloud", "gpt-70b-price", 53, "GPT-70B ** 176.55 $2,500,000",
           "$2,500,000", lambda: plan.cost(256, 176.55, 2.03), "1.08M GPU-hours x $2.03", "about",
           "at $2.03 an hour the five other bills come out as printed, this one is dearer; what its stars stand for "
           "is not in the text", "$2.20M", within=300_000),
    Figure("mpt", "How much LLMs really cost", "h100-speed", 292, "28.3 Days ... 11.6 Days", "11.6 Days",
           lambda: 28.3 / 11.6, "28.3 / 11.6 days", "theirs", "for 1.22 times less money", "2.44x"),
    Figure("mpt", "Multinode Scaling", "ideal-speed-up", 82, "8 GPUs vs. 128 GPUs ... (16x ideal)", "16x",
           lambda: 128 / 8, "128 / 8"),
    Figure("mpt", "Multinode Scaling", "speed-up", 82, "we saw a 14.4x speedup (16x ideal)", "14.4x",
           lambda: 14.4 / (128 / 8), "14.4 / 16", "theirs", "", "90%"),
)
# fmt: on

SECTIONS = (
    Section(
        "What it costs",
        "Cost = GPUs x hours x price. Days, cost and batches are theirs; from days follows an MFU by 6ND, from cost a "
        "price for an hour of one GPU, from a batch a number of steps. They stand in brackets.",
        (
            Table(
                "LLM Training Costs on MosaicML Cloud (mpt, lines 47-53), all on 256 A100s",
                ("model", "tokens (20N)", "days (MFU)", "cost (price)"),
                tuple(_gpt_rows()),
            ),
            Table(
                "MPT-7B Training Costs (mpt, lines 246-252)",
                ("model", "tokens", "batch (steps)", "system", "time", "cost (price)"),
                tuple(_tuned_rows()),
            ),
            Table(
                "How much LLMs really cost, MPT-30B (mpt, lines 290-296)",
                ("hardware", "tokens", "time (MFU)", "cost (price)"),
                tuple(_thirty_rows()),
            ),
        ),
        _ALONE,
    ),
)
