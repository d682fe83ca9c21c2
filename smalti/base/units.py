"""Numbers for people: counts, bytes, seconds. Files and metrics hold plain numbers; only printing rounds."""


def format_count(value: float) -> str:
    """1234567 -> '1.23M'. Decimal steps of a thousand."""
    for limit, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}" if value != int(value) else str(int(value))


def format_bytes(value: float) -> str:
    """1536 -> '1.5 KiB'. Binary steps."""
    amount = float(value)
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or suffix == "TiB":
            return f"{amount:.0f} {suffix}" if suffix == "B" else f"{amount:.1f} {suffix}"
        amount /= 1024
    raise AssertionError("unreachable")


def format_seconds(value: float) -> str:
    """75 -> '1m15s', 0.0123 -> '12.3ms'."""
    if value < 1:
        return f"{value * 1e3:.3g}ms"
    if value < 60:
        return f"{value:.1f}s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def format_frac(value: float) -> str:
    """0.1234 -> '12.3%'. Percent exist only in print."""
    return f"{value * 100:.1f}%"
