"""The context of a model that starts from another one's weights: what is taken over, and how far a rule extends it.

No weight depends on the fields of ``OF_CONTEXT``, and training adapts the weights to other values of them; so a recipe
may state others than those of ``init_from``.
"""

from collections.abc import Mapping
from typing import Any

from smalti.config.model import ROPE_KEYS, ModelConfig

OF_CONTEXT = ("rope_theta", "rope_scaling", "sliding_window", "layer_types")
"""Fields that a recipe with ``init_from`` may state otherwise; ``max_position_embeddings`` is free."""
REQUIRED = tuple(name for name, field in ModelConfig.model_fields.items() if field.is_required())


def below(stated: Mapping[str, Any], learned: ModelConfig) -> dict[str, Any]:
    """Return the values below a section ``model`` that states some fields: those of the model of the weights.

    A scaling that is stated replaces that of the weights. Its original length is theirs if it names none, and the
    longest sequence then is ``factor`` times as long.
    """
    values = learned.model_dump(mode="json")
    scaling = stated.get("rope_scaling")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type") not in ROPE_KEYS:
        return values
    rule, factor = scaling["rope_type"], scaling.get("factor")
    original = scaling.get("original_max_position_embeddings", original_tokens(learned))
    named = "original_max_position_embeddings"
    values["rope_scaling"] = {named: original} if named in ROPE_KEYS[rule][0] else {}
    if rule != "dynamic" and isinstance(factor, int | float) and isinstance(original, int):
        values["max_position_embeddings"] = max(int(original * factor), learned.max_position_embeddings)
    return values


def original_tokens(model: ModelConfig) -> int:
    """Return the longest sequence before the model's own scaling."""
    scaling = model.rope_scaling
    if scaling is None:
        return model.max_position_embeddings
    if scaling.rope_type == "linear" and scaling.factor:
        return int(model.max_position_embeddings / scaling.factor)
    return scaling.original_max_position_embeddings or model.max_position_embeddings


def covered_tokens(wanted: ModelConfig, learned: ModelConfig) -> int | None:
    """Return the length up to which the rotary angles are no larger than those that the weights have seen.

    A larger base divides the lowest frequency by (ratio of bases)^((d-2)/d). None: no limit (ALiBi).
    """
    if wanted.position == "alibi":
        return None
    tokens: float = learned.max_position_embeddings
    scaling = wanted.rope_scaling
    if scaling is not None and scaling != learned.rope_scaling and scaling.rope_type != "dynamic":
        original = scaling.original_max_position_embeddings or original_tokens(learned)
        tokens = original * (scaling.factor or wanted.max_position_embeddings / original)
    elif scaling is None and learned.rope_scaling is not None:
        tokens = original_tokens(learned)
    width = wanted.width_per_head
    return int(tokens * max(1.0, (wanted.rope_theta / learned.rope_theta) ** ((width - 2) / width)) + 0.5)


def change_line(wanted: ModelConfig, learned: ModelConfig) -> str | None:
    """Return ``512 -> 2,048 by yarn, factor 4``; None where context and rule are those of the weights."""
    before, after = learned.max_position_embeddings, wanted.max_position_embeddings
    rules = _rules(wanted, learned)
    if before == after and not rules:
        return None
    by = "; ".join(rules) or ("alibi" if wanted.position == "alibi" else "no rule")
    return f"{before:,} -> {after:,} by {by}" if before != after else f"{after:,}, changed by {by}"


def warning(wanted: ModelConfig, learned: ModelConfig, longest_sequence: int) -> str | None:
    """Return what is wrong with a longer context: more than the rule covers, or than the run trains."""
    before, after = learned.max_position_embeddings, wanted.max_position_embeddings
    covered = covered_tokens(wanted, learned)
    if covered is not None and after > covered:
        rules = _rules(wanted, learned)
        by = f" covered by {'; '.join(rules)}, from" if rules else " of"
        return f"model.max_position_embeddings={after} is more than the {covered}{by}"
    if longest_sequence <= before < after:
        return (
            f"model.max_position_embeddings={after}, but no sequence of the run is longer than the {before} that the "
            f"weights have seen (data.seq_len={longest_sequence}); started from"
        )
    return None


def _rules(wanted: ModelConfig, learned: ModelConfig) -> list[str]:
    scaling = wanted.rope_scaling
    rules = []
    if scaling != learned.rope_scaling:
        factor = "" if scaling is None or scaling.factor is None else f", factor {scaling.factor:g}"
        rules.append("no rope_scaling" if scaling is None else f"{scaling.rope_type}{factor}")
    if wanted.rope_theta != learned.rope_theta:
        rules.append(f"rope_theta {learned.rope_theta:g} -> {wanted.rope_theta:g}")
    layers = range(wanted.num_hidden_layers)
    if [wanted.window(layer) for layer in layers] != [learned.window(layer) for layer in layers]:
        rules.append(f"sliding_window {learned.sliding_window or 'none'} -> {wanted.sliding_window or 'none'}")
    return rules
