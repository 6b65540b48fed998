#!/bin/sh
# Starts Claude Code in the current folder, with a home folder of its own.
set -eu
HOME=$(mktemp -d); export HOME; trap 'rm -rf "$HOME"' EXIT
unset ANTHROPIC_AUTH_TOKEN CLAUDE_CODE_OAUTH_TOKEN CLAUDE_CODE_USE_BEDROCK CLAUDE_CODE_USE_VERTEX
export CLAUDE_CONFIG_DIR="$HOME/.claude" DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 IS_SANDBOX=1
export ANTHROPIC_MODEL="${AGENTRL_MODEL:-policy}" ANTHROPIC_SMALL_FAST_MODEL="${AGENTRL_MODEL:-policy}"
claude --print "$1" --dangerously-skip-permissions < /dev/null
