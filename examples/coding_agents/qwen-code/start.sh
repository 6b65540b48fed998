#!/bin/sh
# Starts Qwen Code in the current folder, with a home folder of its own.
set -eu
HOME=$(mktemp -d); export HOME; trap 'rm -rf "$HOME"' EXIT
export OPENAI_MODEL="${AGENTRL_MODEL:-policy}"
mkdir "$HOME/.qwen"
cat > "$HOME/.qwen/settings.json" <<JSON
{"general": {"disableAutoUpdate": true, "enableAutoUpdate": false}, "privacy": {"usageStatisticsEnabled": false},
 "telemetry": {"enabled": false}, "security": {"auth": {"selectedType": "openai"}}, "model": {"maxSessionTurns": 50}}
JSON
qwen --yolo --prompt "$1" < /dev/null
