#!/bin/sh
# Starts Codex CLI in the current folder, with a home folder of its own.
set -eu
HOME=$(mktemp -d); export HOME; trap 'rm -rf "$HOME"' EXIT
export CODEX_HOME="$HOME/.codex"; mkdir "$CODEX_HOME"
cat > "$HOME/.codex/config.toml" <<TOML
model = "${AGENTRL_MODEL:-policy}"
model_provider = "agentrl"
check_for_update_on_startup = false
web_search = "disabled"
model_auto_compact_token_limit = ${AGENTRL_COMPACT_TOKENS:-48000}
model_context_window = 65536
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
codex exec --skip-git-repo-check --ephemeral --dangerously-bypass-approvals-and-sandbox "$1" < /dev/null
