"""Make the token rows of a chat as the gateway would have recorded them.

Each answer is a call: its prompt continues the answers before it, token for token, and its response
is what the chat template writes for it, up to the token that ends a turn. Where the template
rewrites the past (as those that strip thoughts do), a new row begins, as in a recorded rollout.
Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from agentrl.datasets.chats import Chat
from agentrl.datasets.samples import weighted_row
from agentrl_proxy.errors import ApiError
from agentrl_proxy.rendering.continuity import Conversations, remember_reply, render_prompt
from agentrl_proxy.rendering.renderer import Message, Renderer
from agentrl_tracer.schemas import Json
from agentrl_trainer.data.training_row import TrainingRow

TrainOn = Literal["all", "last", "tagged"]


def chat_rows(renderer: Renderer, chat: Chat, train_on: TrainOn) -> list[TrainingRow]:
    """Return the rows of a chat that train, with the weights of their tokens; none if no answer
    does.

    Raises:
        ValueError: the chat template refuses the messages, or writes an answer so that the model
            could not have said it.
    """
    answers = [at for at, one in enumerate(chat.messages) if one["role"] == "assistant"]
    default = 0.0 if train_on == "tagged" else 1.0
    paths: list[tuple[list[int], list[float]]] = []  # tokens so far, and the weight of each
    conversations = Conversations()
    for at in answers:
        message, before = chat.messages[at], chat.messages[:at]
        if not before:
            raise ValueError("messages[0]: an answer of the assistant, which nothing asks for")
        try:
            prompt = render_prompt(renderer, conversations, before, chat.tools, None)
            response = response_ids(renderer, [*before, message], chat.tools, prompt.text)
        except ApiError as error:
            raise ValueError(error.message) from error
        remember_reply(renderer, conversations, prompt, message, response, "", cut=False)
        known = next((one for one in paths if prompt.ids[: len(one[0])] == one[0]), None)
        if known is None:
            paths.append(known := ([], []))
        tokens, weights = known
        given = chat.weights[at]
        weight = default if given is None else given
        if train_on == "last" and at != answers[-1]:
            weight = 0.0
        weights += [0.0] * (len(prompt.ids) - len(tokens)) + [weight] * len(response)
        tokens[:] = [*prompt.ids, *response]
    return [weighted_row(*path) for path in paths if any(path[1])]


def response_ids(
    renderer: Renderer, messages: Sequence[Message], tools: list[Json] | None, asked: str
) -> list[int]:
    """Return the tokens that a model samples to say the last message.

    Args:
        asked: the prompt's text, as the template wrote it.

    Raises:
        ValueError: the template writes the answer differently.
    """
    normal = renderer.normalize(messages)
    whole = renderer.text(normal, tools, generate=False)
    ending = renderer.ending(whole) or ""
    said = whole[: len(whole) - len(ending)].removeprefix(asked)
    opening, closing = renderer.reasoning_marks or ("", "")
    header = asked.rpartition(opening)[0] if opening else asked
    if opening and asked.rstrip().endswith(opening) and not whole.startswith(asked):
        # The prompt opens a thought, and the template writes the past without it, as DeepSeek-R1's.
        thought = normal[-1].get("reasoning_content", "")
        asked, said = header, f"{thought}\n{closing}\n\n{said.removeprefix(header)}"
    if not whole.startswith(asked) or not whole.endswith(ending):
        raise ValueError(
            f"messages[{len(messages) - 1}]: the chat template does not write this answer after "
            f"the prompt that the model gets: {asked[-40:]!r}, but {whole[-80:]!r}"
        )
    stop = renderer.encode(ending)[:1]
    if not stop or not renderer.is_stop(stop[0]):
        stop = [renderer.tokenizer.eos_token_id]
    return [*renderer.encode(said), *stop]
