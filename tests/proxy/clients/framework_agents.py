"""Agents as their frameworks' own documentation writes them: nothing here but emit_reward is ours.

Imports are inside, so that each attempt pays for one framework only.
"""

from agentrl import emit_reward

MODEL = "policy"


def crew(task):
    from crewai import LLM, Agent, Crew, Process, Task
    from crewai.flow.flow import Flow, listen, start
    from crewai.tools import tool

    @tool("add")
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        emit_reward(0.25, name="used the tool")
        return a + b

    llm = LLM(model=MODEL, temperature=0.5)
    solver = Agent(role="Solver\n", goal="solve it", backstory="exact", llm=llm, tools=[add])
    critic = Agent(role="Critic", goal="find errors", backstory="stern", llm=llm)

    class Game(Flow):
        @start()
        def solve(self):
            tasks = [
                Task(description=task["question"], expected_output="a number", agent=solver),
                Task(description="Is that right?", expected_output="yes or no", agent=critic),
            ]
            crew = Crew(agents=[solver, critic], tasks=tasks, process=Process.sequential)
            return crew.kickoff().raw

        @listen(solve)
        def judge(self, answer):
            emit_reward(1.0, name="turn")
            return answer

    Game().kickoff()
    return 0.5


def graph(task):
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        emit_reward(0.25, name="used the tool")
        return a + b

    agent = create_agent(ChatOpenAI(model=MODEL), [add], name="calculator")
    agent.invoke({"messages": [{"role": "user", "content": task["question"]}]})


async def openai_agents(task):
    from agents import Agent, Runner, function_tool

    @function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        emit_reward(0.25, name="used the tool")
        return a + b

    agent = Agent(name="Adder", instructions="Add.", model=MODEL, tools=[add])
    await Runner.run(agent, task["question"])


def plain(task):
    from openai import OpenAI

    OpenAI().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": task["question"]}]
    )
    emit_reward({"whole": True})
