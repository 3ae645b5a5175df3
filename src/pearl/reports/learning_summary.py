"""Final output of `pearl learn`: the model's accuracy so far, in a few lines."""

import shlex
from typing import TYPE_CHECKING

from pearl.errors import counted, printable
from pearl.reports.text import expected_unknown

if TYPE_CHECKING:
    from pearl.lifecycle.accuracy_estimate import Outcome
    from pearl.lifecycle.model import StoredModel

HOW = {
    "left out": "estimated on {} of its own, each left out of the statistics (cross-validation)",
    "held out": "measured on {} of its own, held out of training",
    "measured": "measured on {}",
}
CORRECTED = "corrected, since its network was trained on all of these images{}"


def ending(model: "StoredModel", measured: "Outcome | None" = None) -> str:
    """Return the result of learning the newest task, and next steps."""
    name, estimated = shlex.quote(str(model.path)), model.outcome
    lines = [line for outcome in (estimated, measured) if outcome is not None for line in outcome_lines(outcome)]
    if not lines:
        lines = ["not measured; use --evaluate FOLDER for other images, or --holdout 0.1 for a share of every class"]
    lines += expected_unknown(model.method.facts(len(model.tasks) - 1).get("refused", []))
    data = "" if measured else f"; pearl evaluate {name} --data FOLDER -o page.html"
    return "\n".join([*lines, f"next: pearl predict {name} PHOTO{data}; pearl export {name} --to onnx"])


def outcome_lines(outcome: "Outcome") -> list[str]:
    """Return at most seven lines."""
    lines = [f"{HOW[outcome.how].format(counted(outcome.images, 'image'))}:"]
    if outcome.new is not None:
        alone = f", {outcome.new_in_task:.1f} % among the task's own (task-IL)"
        lines.append(f"  new classes  {outcome.new:.1f} % correct among all classes (class-IL){alone}")
    if outcome.old_now is not None or outcome.old_then is not None:
        then = "" if outcome.old_then is None else f"{outcome.old_then:.1f} % correct when they were learnt"
        now = "" if outcome.old_now is None else f"{outcome.old_now:.1f} %"
        if then and now:
            then, now = f"{then}, ", f"about {now} now (estimated from their statistics)"
        elif now:
            now += " correct among all classes (class-IL)"
        lines.append(f"  old classes  {then}{now}")
    told = [f"{printable(true)} taken for {printable(said)} ({times})" for true, said, times in outcome.mistakes]
    lines += [f"  mistakes     {', '.join(told)}"] if told else []
    error = f"calibration error {outcome.calibration_error:.1f} points"
    lines.append(f"  how sure     {outcome.sure:.1f} % on average, and right in {outcome.right:.1f} %; {error}")
    if outcome.spared is not None:
        lines.append(f"  ({CORRECTED.format(f' but {outcome.spared:,}' if outcome.spared else '')})")
    return lines
