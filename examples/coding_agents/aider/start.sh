#!/bin/sh
# Starts aider in the current folder. Small files are in the chat.
set -eu
: "${AGENTRL_ALONE:?start it by alone.sh SCRIPT, which gives it a home folder of its own}"
model=openai/${AGENTRL_MODEL:-policy}
export LITELLM_LOCAL_MODEL_COST_MAP=True
# Aider asks for temperature 0 by default, with which nothing is learned.
printf -- '- {name: %s, weak_model_name: %s, edit_format: diff, use_temperature: false}\n' \
    "$model" "$model" > "$HOME/models.yml"
mkdir -p "$HOME/.aider/caches"; echo '{"none": {}}' > "$HOME/.aider/caches/model_prices_and_context_window.json"
message=$1
set -- --model "$model" --model-settings-file "$HOME/models.yml" --yes-always --no-gitignore --no-auto-commits \
    --no-dirty-commits --no-check-update --analytics-disable --no-show-model-warnings --no-show-release-notes \
    --no-detect-urls --no-suggest-shell-commands --no-fancy-input --no-pretty --map-tokens 0 \
    --input-history-file "$HOME/input" --chat-history-file "$HOME/chat"
[ -d .git ] || set -- "$@" --no-git
find . -type f -size -32k ! -path '*/.*' ! -path '*/node_modules/*' | sort | head -n 30 > "$HOME/files"
while read -r file; do set -- "$@" "$file"; done < "$HOME/files"
aider --message="$message" "$@" < /dev/null
