#!/bin/sh
# Starts OpenCode in the current folder.
set -eu
: "${AGENTRL_ALONE:?start it by alone.sh SCRIPT, which gives it a home folder of its own}"
model=${AGENTRL_MODEL:-policy}
export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_DEFAULT_PLUGINS=1
OPENCODE_CONFIG_CONTENT=$(cat <<JSON
{"autoupdate": false, "share": "disabled", "model": "agentrl/$model", "small_model": "agentrl/$model", "permission": "allow",
 "provider": {"agentrl": {"npm": "@ai-sdk/openai-compatible", "name": "agentrl",
   "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
   "models": {"$model": {"name": "$model", "limit": {"context": ${AGENTRL_CONTEXT_LENGTH:-65536}, "output": 4096}}}}}}
JSON
)
export OPENCODE_CONFIG_CONTENT
opencode run -- "$1" < /dev/null
