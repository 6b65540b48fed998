"""An assistant with two tools, written with OpenAI's Agents SDK as its documentation does.

It can set a timer and send a message. The reward is 1 when it called exactly the right tool, as the
program recorded; what the model says about it does not count.

It uses only the Agents SDK and ``emit_reward``. Run it against any OpenAI endpoint:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python examples/openai_agents/agent.py
"""

import os
from dataclasses import dataclass, field

from agents import Agent, RunContextWrapper, Runner, function_tool
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError

from agentrl import emit_reward


@dataclass
class Desk:
    """What the assistant has done."""

    done: list[list] = field(default_factory=list)


@function_tool
def set_timer(desk: RunContextWrapper[Desk], minutes: int) -> str:
    """Sets a timer."""
    desk.context.done.append(["set_timer", minutes])
    return "ok"


@function_tool
def send_message(desk: RunContextWrapper[Desk], to: str, text: str) -> str:
    """Sends a message."""
    desk.context.done.append(["send_message", to, text])
    return "sent"


async def agent(task: dict) -> None:
    assistant = Agent[Desk](
        name="Assistant",
        tools=[set_timer, send_message],
        model=os.environ.get("AGENTRL_MODEL", "gpt-4o-mini"),
    )
    desk = Desk()
    try:
        result = await Runner.run(assistant, task["request"], context=desk, max_turns=4)
        reply = result.final_output
    except (MaxTurnsExceeded, ModelBehaviorError) as problem:  # such as an unknown tool
        reply = f"[{type(problem).__name__}]"
    emit_reward(1.0 if desk.done == [task["wanted"]] else 0.0)
    print(f"{task['request']} {desk.done} {reply}")


if __name__ == "__main__":
    import asyncio

    asyncio.run(agent({"request": "Start a timer for 20 minutes.", "wanted": ["set_timer", 20]}))
