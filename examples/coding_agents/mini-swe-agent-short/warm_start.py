"""Write chats in which mini-swe-agent solves training tasks, for `agentrl sft`.

The base model rarely finds a command by itself, so there is little that rewards could select. Each
chat has the agent's own prompts, the reference command, and the command that ends the task.
Usage: python warm_start.py FILE [COUNT]
"""

import json
import sys
from pathlib import Path

import yaml
from jinja2 import Template

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent / "tasks"))

from make_tasks import shell_tasks, tasks_with_solutions  # noqa: E402

DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def chat(prompts, task, solution):
    """Return the conversation of an agent that needs one command."""
    said = prompts["agent"]
    asked = Template(said["instance_template"]).render(task=task["instruction"])
    seen = Template(prompts["model"]["observation_template"]).render(
        output={"returncode": 0, "output": ""}
    )
    turns = [asked, command(solution), seen, command(DONE)]
    roles = ["user", "assistant"] * 2
    return [
        {"role": "system", "content": said["system_template"]},
        *({"role": role, "content": text} for role, text in zip(roles, turns, strict=True)),
    ]


def command(text):
    return f"```bash\n{text}\n```"


def main():
    path, count = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 24
    prompts = yaml.safe_load((FOLDER / "prompts.yaml").read_text())
    solved = tasks_with_solutions(shell_tasks, 1, count)
    path.write_text("".join(json.dumps({"messages": chat(prompts, *one)}) + "\n" for one in solved))


if __name__ == "__main__":
    main()
