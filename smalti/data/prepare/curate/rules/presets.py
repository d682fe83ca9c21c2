"""The presets by name. The names are those of ``smalti.config.curate.Preset``; a test compares them."""

from collections.abc import Sequence

from smalti.data.prepare.curate.rules.c4 import C4
from smalti.data.prepare.curate.rules.fineweb import FINEWEB_CODE, FINEWEB_PAPER
from smalti.data.prepare.curate.rules.gopher import QUALITY, REPETITION
from smalti.data.prepare.curate.rules.light import CODE_LIGHT, PROSE_LIGHT
from smalti.data.prepare.curate.rules.refinedweb import REFINEDWEB
from smalti.data.prepare.curate.rules.rule import Preset
from smalti.data.prepare.curate.rules.safe import SAFE

NONE = Preset("none", "keeps everything", ())

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        NONE,
        SAFE,
        PROSE_LIGHT,
        CODE_LIGHT,
        QUALITY,
        REPETITION,
        C4,
        FINEWEB_CODE,
        FINEWEB_PAPER,
        REFINEDWEB,
    )
}


def presets_by_name(names: Sequence[str]) -> list[Preset]:
    """Return the presets with these names, in this order."""
    return [PRESETS[name] for name in names]
