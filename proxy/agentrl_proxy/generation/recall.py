"""Remember the reply of a recorded Responses call, as if this process had made it.

So a conversation keeps its exact tokens after a restart, and outside rollouts, where nothing is
remembered between requests.
"""

from __future__ import annotations

from functools import partial

from agentrl_proxy.protocols.chat import translated_request
from agentrl_proxy.protocols.responses import responses_as_chat
from agentrl_proxy.rendering.continuity import Conversations, prompt_of, remember_reply
from agentrl_proxy.rendering.detokenizer import whole_text
from agentrl_proxy.rendering.renderer import Renderer
from agentrl_tracer.schemas import Call


def recall_reply(renderer: Renderer, conversations: Conversations, call: Call) -> None:
    """Remember a completed call. A provider's has no tokens to continue.

    Raises:
        ApiError: its request is refused by now.
    """
    if not call.prompt_ids or call.request is None or call.response is None:
        return
    as_chat = partial(responses_as_chat, leave_out=True)  # it was accepted
    asked, params = translated_request(as_chat, call.request), call.params
    renderer = renderer.with_switches(None, None, params.get("chat_template_kwargs") or {})
    prompt = prompt_of(renderer, call.prompt_ids, asked.messages, asked.tools, call.adapter)
    # The text as generation/response.py read it.
    one_call = bool(params.get("cut_at_second_call"))
    visible = [i for i in call.response_ids if i not in renderer.hidden]
    parser = renderer.parser(tools=asked.tools or False, opening=prompt.opening, one_call=one_call)
    parser.finish(whole_text(renderer.decode_raw, visible, tuple(params["stop"])))
    whole = renderer.decode(call.response_ids)
    cut = parser.ended_at >= 0 or any(stop in whole for stop in params["stop"])
    reply = call.response["choices"][0]["message"]
    remember_reply(renderer, conversations, prompt, reply, call.response_ids, parser.text, cut=cut)
