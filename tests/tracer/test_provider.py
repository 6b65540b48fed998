"""Our provider beside an application's: both get every span, whichever is set first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from otlp_collector import Collector

from agentrl_tracer.otlp_codec import rewards_in

# What an application does: a tracer taken at import, a provider and exporter of its own.
APPLICATION = """
import json, random, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import set_tracer_provider
from agentrl_tracer.tracing import rollout_tracing, tracing
from agentrl import emit, emit_reward

early = trace.get_tracer("early")
theirs = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(theirs))

def ours():
    attempt = rollout_tracing()
    attempt.finish_expected = True
    attempt.router.install_globally()

def done():
    assert rollout_tracing().finish()
    json.dump([s.name for s in theirs.get_finished_spans()], sys.stdout)
"""


def run(collector: Collector, agent: str, **env: str) -> tuple[list[str], list[str]]:
    """The names of the spans that the application's exporter got, and those that we got."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", APPLICATION + textwrap.dedent(agent)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Overriding" not in done.stderr
    return json.loads(done.stdout or "[]"), [span.name for span in collector.spans]


def test_limits_and_switches_of_the_environment_change_no_reward(collector: Collector) -> None:
    switches = {"OTEL_SDK_DISABLED": "true", "OTEL_ATTRIBUTE_COUNT_LIMIT": "0"}
    limits = {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "3"}
    run(collector, "emit_reward({'style': 0.5}, agent='white')", **switches, **limits)
    spans = [replace(one, rollout_id="r", attempt_id="a") for one in collector.spans]
    [reward] = rewards_in(spans)
    assert (reward.name, reward.value, reward.agent) == ("style", 0.5, "white")


def test_half_a_character_in_a_name_loses_nothing(collector: Collector) -> None:
    _, ours = run(
        collector,
        r"""
        ours()
        with early.start_as_current_span("tool \ud83d") as span:
            span.add_event("event \ud83d")
            emit_reward(1)
        done()
        """,
    )
    assert sorted(ours) == ["agentrl.reward", "tool ?"]


def test_theirs_first(collector: Collector) -> None:
    theirs, ours = run(
        collector,
        """
        trace.set_tracer_provider(provider)
        ours()
        with tracing("root"), early.start_as_current_span("a"):
            emit_reward(1)
        done()
        """,
    )
    assert theirs == ["a"]
    assert sorted(ours) == ["a", "agentrl.reward", "root"]


@pytest.mark.parametrize("setter", ["trace.set_tracer_provider", "set_tracer_provider"])
def test_ours_first(collector: Collector, setter: str) -> None:
    theirs, ours = run(
        collector,
        f"""
        ours()
        kept = trace.get_tracer("kept")
        with tracing("root"):
            for tracer in (early, kept):
                with tracer.start_as_current_span("before"):
                    pass
            {setter}(provider)
            for tracer in (early, kept, trace.get_tracer("late")):
                with tracer.start_as_current_span("after"):
                    pass
            more = InMemorySpanExporter()  # as Langfuse and others do
            trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(more))
            with kept.start_as_current_span("last"):
                emit_reward(1)
            trace.get_tracer_provider().shutdown()
        assert [s.name for s in more.get_finished_spans()] == ["last"]
        done()
        """,
    )
    assert theirs == ["after"] * 3 + ["last"]
    expected = ["before"] * 2 + theirs + ["agentrl.reward", "root"]
    assert sorted(ours) == sorted(expected)


def test_sampling_and_open_spans_lose_nothing(collector: Collector) -> None:
    _, ours = run(
        collector,
        """
        ours()
        with tracing("root"):
            trace.get_tracer("user").start_span("abandoned")
            emit_reward(1)
        done()
        """,
        OTEL_TRACES_SAMPLER="always_off",
    )
    assert sorted(ours) == ["abandoned", "agentrl.reward", "root"]
    [abandoned] = [s for s in collector.spans if s.name == "abandoned"]
    assert abandoned.attributes["agentrl.unfinished"] is True


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_children_of_multiprocessing_emit_arrives(collector: Collector, method: str) -> None:
    _, ours = run(
        collector,
        f"""
        import multiprocessing

        ours()
        with tracing("root"):
            context = multiprocessing.get_context("{method}")
            child = context.Process(target=emit, args=("note", {{"a": [1]}}))
            child.start()
            child.join()
            if "{method}" == "fork":
                work = trace.get_tracer("user").start_as_current_span
                child = context.Process(target=lambda: work("in child").__enter__().end())
                child.start()
                child.join()
        done()
        """,
    )
    expected = ["agentrl.note", "root"] + (["in child"] if method == "fork" else [])
    assert sorted(ours) == sorted(expected)
    [note] = [s for s in collector.spans if s.name == "agentrl.note"]
    assert note.attributes == {"agentrl.note.name": "note", "agentrl.note.data": '{"a": [1]}'}


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_what_is_spawned_in_a_process_of_several_rollouts(
    collector: Collector, method: str
) -> None:
    _, ours = run(
        collector,
        f"""
        import multiprocessing, os
        from agentrl_tracer.tracing import attributed

        ids = {{name: os.environ.pop(name) for name in [*os.environ] if "AGENTRL_" in name}}
        with attributed(ids) as attempt:
            context = multiprocessing.get_context("{method}")
            child = context.Process(target=emit_reward, args=(1,))
            child.start()
            child.join()
            assert attempt.finish()
        """,
    )
    assert ours == ["agentrl.reward"]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_module_that_a_spawned_process_imports_knows_its_rollout(
    collector: Collector, tmp_path: Path, method: str
) -> None:
    """As its clients of models need to."""
    (tmp_path / "spawned.py").write_text(
        "import os\nfrom agentrl import emit\nSEEN = os.environ.get('AGENTRL_ATTEMPT_ID')\n"
        "def tell(): emit('of', SEEN)\n"
    )
    run(
        collector,
        f"""
        import multiprocessing, os
        from agentrl_tracer.tracing import attributed

        ids = {{name: os.environ.pop(name) for name in [*os.environ] if "AGENTRL_" in name}}
        import spawned
        with attributed(ids) as attempt:
            child = multiprocessing.get_context("{method}").Process(target=spawned.tell)
            child.start()
            child.join()
            assert attempt.finish()
        """,
        PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]),
    )
    assert [span.attributes["agentrl.note.data"] for span in collector.spans] == ['"a1"']


def test_a_fork_server_starts_processes_of_the_rollout_whose_turn_it_is(
    collector: Collector,
) -> None:
    say = "import os; from agentrl import emit; emit('of', os.environ['AGENTRL_ATTEMPT_ID'])"
    run(
        collector,
        f"""
        import multiprocessing, os

        for attempt in ("first", "second"):
            os.environ["AGENTRL_ATTEMPT_ID"] = attempt
            ours()
            child = multiprocessing.get_context("forkserver").Process(target=exec, args=({say!r},))
            child.start()
            child.join()
        """,
    )
    said = [span.attributes["agentrl.note.data"] for span in collector.spans]
    assert said == ['"first"', '"second"']


def test_a_process_that_forks_goes_on(collector: Collector) -> None:
    """Nothing else is imported: what other modules import can hide a deadlock of the child."""
    agent = """
        import os, signal
        from agentrl import emit
        emit("before")
        if not (child := os.fork()):
            signal.alarm(20)
            emit("in child")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(agent)], timeout=60, check=True)
    assert [span.attributes["agentrl.note.name"] for span in collector.spans] == [
        "before",
        "in child",
    ]


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_an_agent_that_seeds_random_loses_nothing(collector: Collector, first: str) -> None:
    setting, ours = "set_tracer_provider(provider)", "ours()"
    before, later = (setting, ours) if first == "theirs" else (ours, setting)
    run(
        collector,
        f"""
        def emit_all(tracer):
            for _ in range(2):
                random.seed(7)
                with tracer.start_as_current_span("step"):
                    emit_reward(1)

        mine = provider.get_tracer("mine")
        {before}
        tracers = [early, mine, trace.get_tracer("late")]
        if "{first}" == "theirs":
            {later}
        with tracing("root"):
            for tracer in tracers:
                emit_all(tracer)
            if "{first}" == "ours":
                {later}
            for tracer in tracers:
                emit_all(tracer)
        done()
        """,
    )
    # Before it is ours, too, the application's provider keeps its spans.
    alone = 2 if first == "ours" else 0
    assert len({(span.trace_id, span.span_id) for span in collector.spans}) == 25 - alone


def test_large_spans_leave_in_several_requests(collector: Collector) -> None:
    _, ours = run(
        collector,
        """
        ours()
        with tracing("root"):
            for _ in range(10):
                emit("page", "é" * 2_000_000)
            with early.start_as_current_span("step") as span:
                for name in ("prompt", "answer"):
                    span.set_attribute(name, "語" * 3_000_000)
            emit_reward(1)
        done()
        """,
    )
    assert sorted(ours) == ["agentrl.note"] * 10 + ["agentrl.reward", "root", "step"]
    note = next(span for span in collector.spans if span.name == "agentrl.note")
    text = json.loads(str(note.attributes["agentrl.note.data"]))
    assert text.startswith('"éé')
    assert text.endswith("é (cut: 2,000,002 characters)")


def test_a_span_of_the_applications_provider_is_cut_to_what_the_gateway_takes(
    collector: Collector,
) -> None:
    _, ours = run(
        collector,
        """
        trace.set_tracer_provider(TracerProvider())
        ours()
        with tracing("root"):
            with trace.get_tracer("theirs").start_as_current_span("step") as span:
                span.set_attribute("screenshot", "語" * 9_000_000)
                span.set_attribute("short", 3)
                span.add_event("seen", {"pages": ["x" * 4_000_000, "y"]})
            emit_reward(1)
        done()
        """,
    )
    assert sorted(ours) == ["agentrl.reward", "root", "step"]
    step = next(span for span in collector.spans if span.name == "step")
    text = str(step.attributes["screenshot"])
    assert text.startswith("語" * 600_000)
    assert text.endswith("characters]")
    assert len(text) + len(str(step.events)) < 2_000_000
    assert step.attributes["short"] == 3


def test_spans_that_are_recorded_and_not_sampled_are_not_awaited(collector: Collector) -> None:
    theirs, ours = run(
        collector,
        """
        from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

        class RecordOnly(Sampler):
            def should_sample(self, *_, **__):
                return SamplingResult(Decision.RECORD_ONLY)

            def get_description(self):
                return "records"

        trace.set_tracer_provider(TracerProvider(sampler=RecordOnly()))
        ours()
        with trace.get_tracer("app").start_as_current_span("step"):
            emit_reward(1.0)
        done()
        """,
    )
    assert (theirs, ours) == ([], ["agentrl.reward"])
