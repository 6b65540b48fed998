#!/bin/sh
# Starts aider in the current folder, with a home folder of its own.
set -eu
HOME=$(mktemp -d); export HOME; trap 'rm -rf "$HOME"' EXIT
export LITELLM_LOCAL_MODEL_COST_MAP=True
aider --model "openai/${AGENTRL_MODEL:-policy}" --message "$1" --yes-always --no-git --no-gitignore --no-check-update \
    --analytics-disable --no-show-model-warnings --no-show-release-notes --no-detect-urls --no-suggest-shell-commands --no-fancy-input --no-pretty \
    --edit-format diff --input-history-file /dev/null --chat-history-file /dev/null *.py < /dev/null
