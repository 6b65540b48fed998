"""Several gateways, and the vLLM servers that agentrl starts for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from settings import nested

from agentrl.config.commands import ServeConfig, TrainConfig
from agentrl.gateway.group import Gateways
from agentrl.gateway.process import GatewayPlan
from agentrl.samplers.vllm.server import VllmServer


def test_each_gateway_has_a_server_and_waits_for_it_however_long(tmp_path: Path) -> None:
    servers = [VllmServer([], tmp_path / "vllm.log") for _ in range(2)]
    plan = GatewayPlan.of(ServeConfig(), vllm_url=None, store="store.db")
    gateways = Gateways(plan, 3, tmp_path, "127.0.0.1", 0, servers)
    plans = [handle._plan for handle in gateways._handles]
    gateways.stop()
    assert [one.vllm_url for one in plans] == [servers[n].url for n in (0, 1, 0)]
    assert [(one.number, one.gateways, one.vllm_wait) for one in plans] == [
        (number, 3, None) for number in range(3)
    ]
    assert len(set(gateways.urls)) == 3


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 1),
        ({"gateways": 3}, 3),
        ({"samplers": 2}, 2),
        ({"gateways": 4, "samplers": 2, "sampler": "vllm"}, 4),
        ({"sampler": "vllm", "vllm_url": "http://a,http://b"}, 2),
        ({"sampler": "vllm", "vllm_url": None}, 1),  # as earlier runs recorded it
        ({"sampler": "vllm", "vllm_url": "http://a"}, 1),
    ],
)
def test_there_is_a_gateway_for_each_sampler(settings: dict[str, object], count: int) -> None:
    given = TrainConfig.model_validate(nested(agent="a:b", tasks="t", **settings))
    assert given.gateway_count == count


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"gateways": 4, "samplers": 2}, "sampler.samplers: each of 4 gateways has an embedded"),
        ({"gateways": 2, "samplers": 4}, "gateway.gateways: 2 are too few for 4 samplers"),
        ({"samplers": 4, "gateway.port": 65533}, "gateway.port: the last gateway's would be 65536"),
        (
            {"sampler": "vllm", "vllm_url": "http://a", "samplers": 2},
            "sampler.samplers: these are started",
        ),
        (
            {"sampler": "vllm", "sampler.vllm.sleep": True, "max_staleness": 1},
            "sampler.vllm.sleep: with rollouts.max_staleness",
        ),
        ({"backend": "tinker", "samplers": 2}, "sampler.samplers: .* Tinker samples"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(
    settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        TrainConfig.model_validate(nested(agent="a:b", tasks="t", **settings))
