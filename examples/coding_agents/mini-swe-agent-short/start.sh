#!/bin/sh
# Starts mini-swe-agent in the current folder, with short prompts and a home folder of its own.
set -eu
HOME=$(mktemp -d); export HOME; trap 'rm -rf "$HOME"' EXIT
unset XDG_CONFIG_HOME
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True
mini --model "openai/${AGENTRL_MODEL:-policy}" --task "$1" --yolo --exit-immediately --cost-limit 0 \
    --config "$(dirname "$0")/prompts.yaml" --output "$HOME/trajectory.json" < /dev/null
