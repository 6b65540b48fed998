#!/bin/sh
# Starts mini-swe-agent in the current folder, with short prompts.
set -eu
: "${AGENTRL_ALONE:?start it by alone.sh SCRIPT, which gives it a home folder of its own}"
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_COST_TRACKING=ignore_errors
export PYTHONPATH="$(cd "$(dirname "$0")" && pwd)"
mini --model "${AGENTRL_MODEL:-policy}" --task "$1" --yolo --exit-immediately --cost-limit 0 \
    --config "$(dirname "$0")/prompts.yaml" --config agent.step_limit="${AGENTRL_MAX_TURNS:-3}" \
    --output "$HOME/trajectory.json" < /dev/null
