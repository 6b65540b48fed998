#!/bin/sh
# Starts Claude Code in the current folder.
set -eu
: "${AGENTRL_ALONE:?start it by alone.sh SCRIPT, which gives it a home folder of its own}"
export CLAUDE_CONFIG_DIR="$HOME/.claude" DISABLE_AUTOUPDATER=1 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 IS_SANDBOX=1
export ANTHROPIC_MODEL="${AGENTRL_MODEL:-policy}" ANTHROPIC_SMALL_FAST_MODEL="${AGENTRL_MODEL:-policy}"
context=${AGENTRL_CONTEXT_LENGTH:-65536}
# It compacts its conversation before the context, less the longest answer, is used up. Without a
# window of its own, which is 100,000 or more, it would wait for a refusal.
export CLAUDE_CODE_MAX_CONTEXT_TOKENS="$context" CLAUDE_CODE_MAX_OUTPUT_TOKENS=4096
export CLAUDE_CODE_AUTO_COMPACT_WINDOW=$((context > 100000 ? context : 100000))
claude --print --dangerously-skip-permissions -- "$1" < /dev/null
