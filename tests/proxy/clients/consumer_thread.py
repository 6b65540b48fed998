"""A queue's consumer thread, started by one rollout, that works for two.

Run by test_propagation.py: two claims on the first line of stdin; another line once the first one's
attempt has ended. Prints the status of each call that the thread made.
"""

import contextvars
import json
import os
import queue
import sys
import threading

import openai

from agentrl_tracer.tracing import attributed, tracing

CLIENT = openai.OpenAI(max_retries=0)
JOBS: queue.Queue = queue.Queue()
DONE: queue.Queue = queue.Queue()


def ask(text):
    try:
        CLIENT.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
        return 200
    except openai.APIStatusError as error:
        return error.status_code


def consume():
    while True:
        run, text = JOBS.get()
        DONE.put(run(ask, text))


def directly(function, *args):
    return function(*args)


def by_thread(run, text):
    JOBS.put((run, text))
    return DONE.get(timeout=30)


def attribution(claim):
    ids = {f"AGENTRL_{name.upper()}": claim[name] for name in ("rollout_id", "attempt_id", "key")}
    return attributed(ids | {"AGENTRL_GATEWAY": os.environ["AGENTRL_GATEWAY"]})


starter, other = json.loads(sys.stdin.readline())
found = {}
with attribution(starter) as mine, tracing("agent"):
    threading.Thread(target=consume, daemon=True).start()
    found["own"] = by_thread(directly, "of the starter")
    with attribution(other), tracing("agent"):  # as another task of this process would
        found["while"] = by_thread(directly, "of the other, while the starter runs")
print(mine.finish(), flush=True)  # noqa: T201
sys.stdin.readline()
with attribution(other) as mine, tracing("agent"):
    found["after"] = by_thread(directly, "of the other, after the starter")
    found["carried"] = by_thread(contextvars.copy_context().run, "of the other, carried")
mine.finish()
print(json.dumps(found), flush=True)  # noqa: T201
os._exit(0)
