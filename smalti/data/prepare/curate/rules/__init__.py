"""Quality rules, in presets with the thresholds of their source.

To add a rule, add a ``Rule`` to the preset in its file. To add a preset, add a ``Preset`` to ``presets.PRESETS``, and
its name to ``smalti.config.curate.Preset``.
"""
