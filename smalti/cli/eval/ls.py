"""``smalti eval ls``: lists suites and tasks."""

from smalti.cli.options import Json
from smalti.cli.tables import print_json


def ls(as_json: Json = False) -> None:
    """List suites and tasks."""
    from smalti.config.eval import suites, task_lines
    from smalti.evals.gauntlet.table import BENCHMARKS

    if as_json:
        configs = {name: config.model_dump(mode="json") for name, config in suites().items()}
        print_json({"suites": configs, "tasks": task_lines(), "gauntlet": [b.name for b in BENCHMARKS]})
        return
    print("suites")
    for name, config in suites().items():
        print(f"  {name:<12} {', '.join(map(str, config.tasks))}")
    print("tasks")
    for task, line in task_lines().items():
        print(f"  {task:<12} {line}")
    print("benchmarks of the gauntlet (data=DIR has their files)")
    for category in dict.fromkeys(benchmark.category for benchmark in BENCHMARKS):
        names = [benchmark.name for benchmark in BENCHMARKS if benchmark.category == category]
        print(f"  {category}: {', '.join(names)}")
