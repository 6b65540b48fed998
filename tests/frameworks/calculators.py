"""Agents as their frameworks' own documentation begins: default client, one agent, one tool.

Some answer a second user turn, which goes through what the framework keeps of the first.

Imports are inside, so that each environment needs one framework only. Each function returns the
reward: the length of the answer, so that the rollouts of a group differ.
"""

import asyncio
import os

QUESTION = "What is 2 + 3?"
TURNS = (QUESTION, "And 4 + 5?")
INSTRUCTIONS = "Add the numbers with the tool."


def model():
    return os.environ["AGENTRL_MODEL"]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def length(answer):
    return len(str(answer)) / 10


def openai(task):
    from openai import OpenAI

    client, messages = OpenAI(), []
    for question in TURNS:
        messages.append({"role": "user", "content": question})
        said = client.chat.completions.create(model=model(), messages=messages, max_tokens=32)
        messages.append(said.choices[0].message)
    return length(messages[-1].content)


def agno(task):
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat

    agent = Agent(
        name="calculator", model=OpenAIChat(id=model()), instructions=INSTRUCTIONS, tools=[add]
    )
    return length(agent.run(QUESTION).content)


def agent_framework(task):
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatClient

    async def run():
        client = OpenAIChatClient(model=model())
        agent = Agent(client=client, name="calculator", instructions=INSTRUCTIONS, tools=[add])
        session = agent.create_session()
        for question in TURNS:
            said = await agent.run(question, session=session)
        return said.text

    return length(asyncio.run(run()))


def autogen(task):
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_core.models import ModelFamily
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def run():
        client = OpenAIChatCompletionClient(
            model=model(),
            model_info={
                "vision": False,
                "function_calling": True,
                "json_output": True,
                "family": ModelFamily.UNKNOWN,
                "structured_output": True,
            },
        )
        agent = AssistantAgent(
            "calculator", model_client=client, tools=[add], system_message=INSTRUCTIONS
        )
        team = RoundRobinGroupChat([agent], termination_condition=MaxMessageTermination(3))
        result = await team.run(task=QUESTION)
        await client.close()
        return result.messages[-1].content

    return length(asyncio.run(run()))


def camel(task):
    from camel.agents import ChatAgent
    from camel.models import ModelFactory
    from camel.toolkits import FunctionTool
    from camel.types import ModelPlatformType

    chosen = ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI_COMPATIBLE_MODEL,
        model_type=model(),
        url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = ChatAgent(INSTRUCTIONS, model=chosen, tools=[FunctionTool(add)])
    return length(agent.step(QUESTION).msgs[0].content)


def crewai(task):
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    agent = Agent(
        role="calculator",
        goal=INSTRUCTIONS,
        backstory="Exact.",
        llm=LLM(model=model()),
        tools=[tool("add")(add)],
        max_iter=2,
    )
    asked = Task(description=QUESTION, expected_output="a number", agent=agent)
    return length(Crew(agents=[agent], tasks=[asked]).kickoff().raw)


def dspy(task):
    import dspy
    from dspy.utils.exceptions import AdapterParseError

    dspy.configure(lm=dspy.LM(f"openai/{model()}"))
    try:
        return length(dspy.Predict("question -> answer")(question=QUESTION).answer)
    except AdapterParseError as error:  # the answer was cut off
        return length(error.lm_response)


def google_adk(task):
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    async def run():
        agent = LlmAgent(
            name="calculator",
            model=LiteLlm(model=f"openai/{model()}"),
            instruction=INSTRUCTIONS,
            tools=[add],
        )
        runner = InMemoryRunner(agent=agent, app_name="sums")
        session = await runner.session_service.create_session(app_name="sums", user_id="user")
        asked = types.Content(role="user", parts=[types.Part(text=QUESTION)])
        said = ""
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=asked
        ):
            for part in (event.content and event.content.parts) or ():
                said += part.text or ""
        return said

    return length(asyncio.run(run()))


def haystack(task):
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    generator = OpenAIChatGenerator(model=model())
    tools = [create_tool_from_function(add)]
    agent = Agent(chat_generator=generator, system_prompt=INSTRUCTIONS, tools=tools)
    return length(agent.run(messages=[ChatMessage.from_user(QUESTION)])["last_message"].text)


def langgraph(task):
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(
        ChatOpenAI(model=model()), [add], system_prompt=INSTRUCTIONS, name="calculator"
    )
    state = {"messages": []}
    for question in TURNS:
        asked = {"role": "user", "content": question}
        state = agent.invoke({"messages": [*state["messages"], asked]})
    return length(state["messages"][-1].content)


def llama_index(task):
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    async def run():
        llm = OpenAILike(
            model=model(),
            api_base=os.environ["OPENAI_BASE_URL"],
            is_chat_model=True,
            is_function_calling_model=True,
        )
        agent = FunctionAgent(
            name="calculator", llm=llm, tools=[add], system_prompt=INSTRUCTIONS, timeout=60
        )
        return await agent.run(QUESTION)

    return length(asyncio.run(run()))


def openai_agents(task):
    from agents import Agent, Runner, function_tool

    agent = Agent(
        name="calculator", instructions=INSTRUCTIONS, model=model(), tools=[function_tool(add)]
    )
    said = Runner.run_sync(agent, QUESTION)
    more = [*said.to_input_list(), {"role": "user", "content": TURNS[1]}]
    return length(Runner.run_sync(agent, more).final_output)


def pydantic_ai(task):
    from pydantic_ai import Agent

    calculator = Agent(f"openai:{model()}", instructions=INSTRUCTIONS, tools=[add])
    return length(calculator.run_sync(QUESTION).output)


def semantic_kernel(task):
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Sums:
        @kernel_function
        def add(self, a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

    agent = ChatCompletionAgent(
        service=OpenAIChatCompletion(ai_model_id=model()),
        name="calculator",
        instructions=INSTRUCTIONS,
        plugins=[Sums()],
    )

    async def run():
        thread = None
        for question in TURNS:
            said = await agent.get_response(messages=question, thread=thread)
            thread = said.thread
        return said

    return length(asyncio.run(run()))


def smolagents(task):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    chosen = OpenAIServerModel(
        model_id=model(),
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )
    agent = ToolCallingAgent(tools=[tool(add)], model=chosen, max_steps=2, name="calculator")
    return length(agent.run(QUESTION))


def strands(task):
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    agent = Agent(
        name="calculator",
        model=OpenAIModel(model_id=model()),
        system_prompt=INSTRUCTIONS,
        tools=[tool(add)],
    )
    return length(agent(QUESTION))
