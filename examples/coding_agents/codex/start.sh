#!/bin/sh
# Starts Codex CLI in the current folder.
set -eu
: "${AGENTRL_ALONE:?start it by alone.sh SCRIPT, which gives it a home folder of its own}"
context=${AGENTRL_CONTEXT_LENGTH:-65536}
export CODEX_HOME="$HOME/.codex"; mkdir "$CODEX_HOME"
cat > "$HOME/.codex/config.toml" <<TOML
model = "${AGENTRL_MODEL:-policy}"
model_provider = "agentrl"
check_for_update_on_startup = false
web_search = "disabled"
model_context_window = $context
model_auto_compact_token_limit = $((context * 3 / 4))
[analytics]
enabled = false
[history]
persistence = "none"
[model_providers.agentrl]
name = "agentrl"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
TOML
codex exec --skip-git-repo-check --ephemeral --dangerously-bypass-approvals-and-sandbox -- "$1" < /dev/null
