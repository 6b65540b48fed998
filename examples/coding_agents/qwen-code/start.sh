#!/bin/sh
# Starts Qwen Code in the current folder.
set -eu
: "${AGENTRL_ALONE:?start it by alone.sh SCRIPT, which gives it a home folder of its own}"
export OPENAI_MODEL="${AGENTRL_MODEL:-policy}"
mkdir "$HOME/.qwen"
cat > "$HOME/.qwen/settings.json" <<JSON
{"general": {"disableAutoUpdate": true, "enableAutoUpdate": false}, "privacy": {"usageStatisticsEnabled": false},
 "telemetry": {"enabled": false}, "security": {"auth": {"selectedType": "openai"}},
 "model": {"maxSessionTurns": 50, "generationConfig": {"contextWindowSize": ${AGENTRL_CONTEXT_LENGTH:-65536}}}}
JSON
qwen --yolo --prompt="$1" < /dev/null
