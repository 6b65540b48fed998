#!/bin/sh
# Starts OpenCode in the current folder, with a home folder of its own.
set -eu
HOME=$(mktemp -d); export HOME; trap 'rm -rf "$HOME"' EXIT
unset XDG_CONFIG_HOME XDG_DATA_HOME XDG_CACHE_HOME XDG_STATE_HOME
model=${AGENTRL_MODEL:-policy}
export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_DEFAULT_PLUGINS=1
OPENCODE_CONFIG_CONTENT=$(cat <<JSON
{"autoupdate": false, "share": "disabled", "model": "agentrl/$model", "small_model": "agentrl/$model", "permission": "allow",
 "provider": {"agentrl": {"npm": "@ai-sdk/openai-compatible", "name": "agentrl",
   "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
   "models": {"$model": {"name": "$model", "limit": {"context": 65536, "output": 4096}}}}}}
JSON
)
export OPENCODE_CONFIG_CONTENT
opencode run "$1" < /dev/null
