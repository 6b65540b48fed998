#!/bin/sh
# Starts Claude Code in the current folder.
set -eu
: "${AGENTRL_ALONE:?start it by alone.sh SCRIPT, which gives it a home folder of its own}"
export CLAUDE_CONFIG_DIR="$HOME/.claude" DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 IS_SANDBOX=1
export ANTHROPIC_MODEL="${AGENTRL_MODEL:-policy}" ANTHROPIC_SMALL_FAST_MODEL="${AGENTRL_MODEL:-policy}"
# It compacts its conversation before the context, less the longest answer, is used up.
export CLAUDE_CODE_MAX_CONTEXT_TOKENS="${AGENTRL_CONTEXT_LENGTH:-65536}" CLAUDE_CODE_MAX_OUTPUT_TOKENS=4096
claude --print "$1" --dangerously-skip-permissions < /dev/null
