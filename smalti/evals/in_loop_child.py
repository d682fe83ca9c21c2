"""The child process of ``in_loop_generation``: exports a checkpoint and runs tasks on it.

``python -m smalti.evals.in_loop_child FOLDER PARENT``: the folder of the checkpoint with ``request.json``, in which
``scores.json`` is written last, and the process id of the trainer, with which this process ends. Results and samples go
to the run's ``evals/SUITE/TIME``. Another start resumes after the last finished task.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from smalti.base import clock, log, store
from smalti.base.env import log_level
from smalti.base.processes import die_with_parent, use_idle_priority

REQUEST, SCORES = "request.json", "scores.json"


def main(folder: Path, parent: int) -> None:
    """Run the request of ``folder``."""
    begin_s = clock.now_s()
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or a scheduler sends them to the trainer too
        signal.signal(number, signal.SIG_IGN)
    if (arm := die_with_parent(signal.SIGKILL, parent)) is not None:
        arm()
    if (folder / SCORES).exists():  # the trainer was killed before it had read them
        return
    request = store.read_json(folder / REQUEST)
    if request["priority"] == "idle":
        use_idle_priority()
    log.setup(log_level())
    results = _evaluate(folder, request)
    seconds = round(clock.now_s() - begin_s, 3)
    store.write_json(folder / SCORES, {"tasks": results["tasks"], "folder": results["folder"], "seconds": seconds})


def _evaluate(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from smalti.config.eval import EvalConfig
    from smalti.data.tokenizer.chat import load_chat
    from smalti.distributed.checkpoint.export import export
    from smalti.evals import suite
    from smalti.evals.cache import Cache
    from smalti.serve.engine.engine import Engine
    from smalti.track.checkpoints.names import step_of

    torch.set_num_threads(request["threads"])
    step, target = step_of(folder), folder / "export"
    if not target.exists():
        export(request["run"], step=step, output=target, merge=request["merge"], checkpoints=folder.parent)
    return suite.run(
        Engine.from_folder(target, device="cpu"),
        EvalConfig.model_validate(request["suite"]),
        request["run"],
        about={"compute_dtype": "fp32", "step": step},
        announce=lambda name: log.get("evals").info("%s", name),
        chat=load_chat(target),
        cache=Cache(folder / "cache", target, "fp32"),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # torch's destructors take a second
