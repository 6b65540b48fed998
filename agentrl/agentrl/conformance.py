"""Ask a server of Tinker's protocol what it does and what it does not.

python -m agentrl.conformance URL --model NAME      # needs the extra: tinker

Every check uses adapters of its own, and what it finds is one line. A training over such a server
(``--backend tinker``) needs the checks that are marked so.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import tinker
from tinker import types

from agentrl.console.output import print_line, stderr
from agentrl_trainer.client.tinker.probe import QUESTIONS, Question, asked
from agentrl_trainer.client.tinker.service import TinkerServiceClient

_PROMPT, _ANSWER = [11, 12, 13, 14], [21, 31, 32, 33, 34]
_TOKENS = [*_PROMPT, *_ANSWER]
_ALIKE = 0.1
"""Log-probs are alike if they are this share closer than those of a server that does otherwise."""
_MOVED = 1e-3
_STEP = types.AdamParams(learning_rate=1e-3)
_LOSSES = ("importance_sampling", "ppo", "cispo", "dro")


class Differs(Exception):
    """The server does something else; the message says what."""


@dataclass(frozen=True, slots=True)
class Server:
    """A session of the SDK with the server, and what its adapters are made of."""

    ours: TinkerServiceClient
    service: Any
    model: str
    rank: int

    def client(self, **options: Any) -> Any:
        options = {"rank": self.rank, "seed": 1} | options
        return self.service.create_lora_training_client(self.model, **options).result()

    def alike(self, count: int) -> list[Any]:
        """Make clients with equal weights."""
        path = self.client().save_state("conformance-start").result().path
        resume = self.service.create_training_client_from_state
        return [resume(path).result() for _ in range(count)]


Check = Callable[[Server], str]
CHECKS: list[tuple[str, bool, Check]] = []
"""Name, whether agentrl's training needs it, and what returns a detail."""


def check(name: str, *, needed: bool = False) -> Callable[[Check], Check]:
    def added(function: Check) -> Check:
        CHECKS.append((name, needed, function))
        return function

    return added


def run(server: Server, show: Callable[[str], None]) -> list[tuple[str, bool, bool, str]]:
    """Make all checks; return name, needed, passed and the detail of each.

    Args:
        show: receives a check's name before it begins.
    """
    found: list[tuple[str, bool, bool, str]] = []
    for name, needed, function in CHECKS:
        show(name)
        try:
            found.append((name, needed, True, function(server)))
        except Exception as error:  # whatever a server of others may answer
            said = " ".join(str(error).split())[:300]
            kind = "" if isinstance(error, Differs) else f"{type(error).__name__}: "
            found.append((name, needed, False, kind + said))
    return found


# ---- what is trained


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> Any:
    columns: dict[str, Any] = {"target_tokens": list(tokens[1:])}
    columns |= {name: [0.0] * (len(tokens) - 1 - len(x)) + [*x] for name, x in inputs.items()}
    read = types.ModelInput.from_ints(list(tokens[:-1]))
    return types.Datum(model_input=read, loss_fn_inputs=columns)


def logprobs(client: Any, tokens: Sequence[int] = _TOKENS) -> list[float]:
    """Return the trainer's log-probs of the tokens after the prompt."""
    done = client.forward([datum(tokens, weights=[])], "cross_entropy").result()
    return [*done.loss_fn_outputs[0]["logprobs"].data][len(_PROMPT) - 1 :]


def learn(client: Any, *rows: Any, loss: str = "cross_entropy") -> None:
    """Make one step."""
    client.forward_backward(list(rows), loss).result()
    client.optim_step(_STEP).result()


def shown() -> Any:
    """The answer, to be imitated."""
    return datum(_TOKENS, weights=[1.0] * len(_ANSWER))


def rewarded(client: Any, tokens: Sequence[int], advantages: Sequence[float]) -> Any:
    own = logprobs(client, tokens)[: len(advantages)]
    return datum(tokens, logprobs=own, advantages=advantages)


def require_like(
    found: Sequence[float], expected: Sequence[float], otherwise: Sequence[float], whose: str
) -> str:
    """Require log-probs that are much closer to what is expected than to what would be wrong."""
    apart, wrong = (
        max(abs(one - other) for one, other in zip(which, expected, strict=True))
        for which in (found, otherwise)
    )
    said = f"{whose} log-probs differ by up to {apart:.1g}; {wrong:.1g} would be wrong"
    if not apart < _ALIKE * wrong:
        raise Differs(said)
    return said


def require_moved(found: float, what: str) -> str:
    said = f"{what} changed by {found:+.2g}"
    if not found >= _MOVED:
        raise Differs(said)
    return said


# ---- the checks


@check("lists its models", needed=True)
def _capabilities(server: Server) -> str:
    served = server.ours.get_server_capabilities().supported_models
    names = [one.model_name for one in served]
    if server.model not in names:
        raise Differs(f"{server.model} is not among {names}")
    return ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")


@check("trainer and sampler compute the same log-probs", needed=True)
def _same_logprobs(server: Server) -> str:
    client = server.client()
    before = logprobs(client)
    learn(client, shown())
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(_TOKENS)
    found = sampler.compute_logprobs(prompt).result()
    if len(found) != len(_TOKENS):
        raise Differs(f"{len(found)} log-probs came for {len(_TOKENS)} tokens")
    return require_like(found[len(_PROMPT) :], logprobs(client), before, "after a step their")


@check("cross_entropy raises what it is shown", needed=True)
def _learns(server: Server) -> str:
    client = server.client()
    before = sum(logprobs(client))
    learn(client, shown())
    return require_moved(sum(logprobs(client)) - before, "the answer's log-prob")


for _question in QUESTIONS:

    @check(_question.name, needed=True)
    def _objective(server: Server, question: Question = _question) -> str:
        if wrong := asked(server.ours.probe(server.model, server.rank), question):
            raise Differs(wrong)
        return "one step shows it"


@check("gradients of two calls add up", needed=True)
def _adds_up(server: Server) -> str:
    one, two, last = server.alike(3)
    other = datum([*_PROMPT, 41, 42], weights=[1.0, 1.0])
    learn(one, shown(), other)
    two.forward_backward([shown()], "cross_entropy").result()
    learn(two, other)
    learn(last, other)
    return require_like(logprobs(two), logprobs(one), logprobs(last), "one call's and two calls'")


@check("a token without an advantage does not learn", needed=True)
def _silent(server: Server) -> str:
    silent, taught = server.alike(2)
    before = logprobs(silent)
    for client, advantage in ((silent, 0.0), (taught, 1.0)):
        row = rewarded(client, _TOKENS, [advantage] * len(_ANSWER))
        learn(client, row, loss="importance_sampling")
    return require_like(logprobs(silent), before, logprobs(taught), "later and earlier")


for _name in _LOSSES:

    @check(f"the loss {_name}", needed=_name in ("importance_sampling", "ppo"))
    def _loss(server: Server, name: str = _name) -> str:
        client = server.client()
        before = logprobs(client)[0]
        learn(client, rewarded(client, _TOKENS, [1.0] * len(_ANSWER)), loss=name)
        return require_moved(logprobs(client)[0] - before, "a rewarded token's log-prob")


@check("losses of one's own")
def _custom(server: Server) -> str:
    client = server.client()
    before = sum(logprobs(client))

    def loss(_data: Any, computed: list[Any]) -> tuple[Any, dict[str, float]]:
        return -computed[0].sum(), {"mine": 2.0}

    row = datum(_TOKENS, weights=[])
    metrics = client.forward_backward_custom([row], loss).result().metrics
    client.optim_step(_STEP).result()
    if metrics.get("mine") != 2.0:
        raise Differs("its own metrics are lost")
    return require_moved(sum(logprobs(client)) - before, "the answer's log-prob")


@check("a seed draws the same adapter")
def _seeds(server: Server) -> str:
    one, two, other = (server.client(seed=seed) for seed in (7, 7, 8))
    for client in (one, two, other):
        learn(client, shown())
    return require_like(logprobs(two), logprobs(one), logprobs(other), "two adapters'")


@check("adapters of two ranks learn apart")
def _apart(server: Server) -> str:
    one, two = server.client(), server.client(rank=2 * server.rank)
    before = logprobs(two)
    learn(one, shown())
    return require_like(logprobs(two), before, logprobs(one), "the other adapter's")


@check("goes on from a state with its optimizer", needed=True)
def _state(server: Server) -> str:
    client = server.client()
    learn(client, shown())
    path = client.save_state("conformance").result().path
    again = server.service.create_training_client_from_state_with_optimizer(path).result()
    fresh = server.service.create_training_client_from_state(path).result()
    for one in (client, again, fresh):
        learn(one, datum([*_PROMPT, 41, 42], weights=[1.0, 1.0]))
    return require_like(logprobs(again), logprobs(client), logprobs(fresh), "both clients'")


@check("samples what it is asked for", needed=True)
def _samples(server: Server) -> str:
    sampler = server.service.create_sampling_client(base_model=server.model).result()
    prompt = types.ModelInput.from_ints(_PROMPT)
    wanted = types.SamplingParams(max_tokens=4, temperature=1.0, seed=3)
    answers = sampler.sample(prompt, 2, wanted).result().sequences
    if len(answers) != 2:
        raise Differs(f"2 answers were asked for, {len(answers)} came")
    if any(len(one.tokens) > 4 or len(one.logprobs) != len(one.tokens) for one in answers):
        raise Differs(
            "an answer is longer than max_tokens, or does not have one log-prob for each token"
        )
    again = sampler.sample(prompt, 2, wanted).result().sequences
    same = [one.tokens for one in answers] == [one.tokens for one in again]
    return "a seed repeats its answers" if same else "a seed does not repeat its answers"


@check("stops at a token")
def _stops(server: Server) -> str:
    sampler = server.service.create_sampling_client(base_model=server.model).result()
    prompt = types.ModelInput.from_ints(_PROMPT)
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0)
    [whole] = sampler.sample(prompt, 1, greedy).result().sequences
    stop = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[whole.tokens[2]])
    [short] = sampler.sample(prompt, 1, stop).result().sequences
    end = whole.tokens.index(whole.tokens[2]) + 1
    if [*short.tokens] not in ([*whole.tokens[:end]], [*whole.tokens[: end - 1]]):
        raise Differs(f"stop {whole.tokens[2]} of {whole.tokens} gave {short.tokens}")
    return f"after {len(short.tokens)} tokens"


@check("columns of other lengths are refused")
def _refuses(server: Server) -> str:
    client = server.client()
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints(_TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": _TOKENS[1:], "weights": [1.0]},  # type: ignore[arg-type]
    )
    try:
        client.forward_backward([wrong], "cross_entropy").result(timeout=60)
    except TimeoutError as error:
        raise Differs("no answer came within 60 s") from error
    except Exception as error:
        return " ".join(str(error).split())[:120]
    raise Differs("weights of one token for eight targets were taken")


def main() -> None:
    """Run the checks of the command line; exits with 1 if one that agentrl needs failed."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.conformance", description=__doc__)
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8080")
    parser.add_argument("--model", required=True, help="as the server names it")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    given = parser.parse_args()
    os.environ.setdefault("TINKER_API_KEY", "tml-conformance")  # of servers that ask for none
    where = urlsplit(given.url)
    if where.scheme not in ("http", "https") or not where.hostname:
        parser.error(f"url: {given.url!r} needs a scheme, such as http://127.0.0.1:8080")
    try:  # the SDK would try for minutes
        socket.create_connection(
            (where.hostname, where.port or {"http": 80}.get(where.scheme, 443)), timeout=10
        ).close()
    except (OSError, ValueError) as error:
        parser.error(f"url: no server answers at {given.url}: {error}. Start it, or correct it")
    ours = TinkerServiceClient(base_url=given.url)
    service = tinker.ServiceClient(base_url=given.url)
    server = Server(ours, service, given.model, given.rank)
    found = run(server, lambda name: print_line(f"... {name}", to=stderr))
    lines = ["| check | needed to train | |", "|---|---|---|"]
    for name, needed, passed, detail in found:
        said = detail if passed else f"**no**: {detail}"
        lines.append(f"| {name} | {'yes' if needed else ''} | {said} |")
    sys.stdout.write("\n".join(lines) + "\n")
    failed = [name for name, needed, passed, _ in found if needed and not passed]
    sys.exit(f"agentrl cannot train over it: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
