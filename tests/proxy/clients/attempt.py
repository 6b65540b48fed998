"""Runs one attempt as a runner's child does: ``attempt.py CONFIG CLAIM``, both JSON."""

import json
import sys
from dataclasses import asdict

from agentrl.runner.agent_process.attempts import run_attempt
from agentrl.runner.protocol import RunnerConfig
from agentrl_tracer.schemas import Claim

config = RunnerConfig.from_json(sys.argv[1])
ending = run_attempt(config, Claim(**json.loads(sys.argv[2])))
sys.stdout.write(f"\n{json.dumps(asdict(ending))}\n")
