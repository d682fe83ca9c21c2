"""Whether the models of a tuning run read the same tokens: the one that is tuned, its reference and its teacher."""

from smalti.base.errors import UserError
from smalti.config.tune import TuneConfig
from smalti.train.origin import difference, entries_of, model_of, require_whole, tokenizer_of


def check(tune: TuneConfig, tokenizer: str, origin: str) -> None:
    """Raise UserError where a model was trained with other tokens than those of the folder ``tokenizer``.

    The model that is tuned may have fewer, unless it is the reference too. A tokenizer without a table of entries is
    not compared. DataError for a teacher that is no model.
    """
    is_reference = tune.preference is not None and tune.preference.reference_or_default is not None
    name = f"the reference, init_from={origin}," if is_reference else f"init_from={origin}"
    hint = "leave out data.tokenizer: that of init_from is taken"
    if is_reference:
        hint += "; for a larger one, 'smalti tune sft' first, and init_from=its export"
    _require(tokenizer, origin, name, hint, may_have_fewer=not is_reference)
    if tune.distill is not None:
        teacher = tune.distill.teacher
        model_of(teacher)
        require_whole(teacher)
        hint = f"tune.distill.teacher=FOLDER of a model with the tokenizer in {tokenizer}"
        _require(tokenizer, teacher, f"the teacher, tune.distill.teacher={teacher},", hint, may_have_fewer=False)


def _require(tokenizer: str, source: str, name: str, hint: str, *, may_have_fewer: bool) -> None:
    ours, theirs = entries_of(tokenizer), entries_of(tokenizer_of(source))
    if ours is None or theirs is None:
        return
    reason = difference(ours, theirs)
    if reason is None and len(ours[0]) > len(theirs[0]) and not may_have_fewer:
        reason = f"{len(theirs[0]):,} entries there and {len(ours[0]):,} here"
    if reason is not None:
        raise UserError(
            f"{name} was trained with another tokenizer than that of the examples ({tokenizer}): {reason}",
            allowed="the same tokens, with the same ids",
            hint=hint,
        )
