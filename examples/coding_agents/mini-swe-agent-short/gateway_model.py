"""A model class for mini-swe-agent (`model_class` in prompts.yaml) that starts in half a second."""

import os

from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel


class GatewayModel(OpenRouterTextbasedModel):
    """mini-swe-agent's own text model for OpenRouter, sent to OPENAI_BASE_URL."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self._api_url = os.environ["OPENAI_BASE_URL"].rstrip("/") + "/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
