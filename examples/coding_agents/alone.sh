#!/bin/sh
# alone.sh SCRIPT ARGUMENT ...: runs a start script with a home folder of its own, which is removed
# at the end, and with these of the environment's variables only. AGENTRL_PASS_ON="JAVA_HOME GOPATH"
# names more of them. Without a task's repository it runs in an empty folder, not in the user's.
set -eu
for name in $(awk 'BEGIN { for (name in ENVIRON) if (name ~ /^[A-Za-z_][A-Za-z_0-9]*$/) print name }'); do
    case $name in
        PATH | LANG | LC_* | TZ | TERM | TMPDIR | USER | LOGNAME | SHELL | PWD) continue ;;
        OPENAI_BASE_URL | OPENAI_API_BASE | OPENAI_API_KEY | ANTHROPIC_BASE_URL | ANTHROPIC_API_KEY) continue ;;
        AGENTRL_MODEL | AGENTRL_CONTEXT_LENGTH | AGENTRL_MAX_TURNS | AGENTRL_ATTEMPT_FOLDER | AGENTRL_PASS_ON) continue ;;
        HTTP_PROXY | HTTPS_PROXY | NO_PROXY | http_proxy | https_proxy | no_proxy) continue ;;
        SSL_CERT_FILE | SSL_CERT_DIR | REQUESTS_CA_BUNDLE | NODE_EXTRA_CA_CERTS) continue ;;
    esac
    case " ${AGENTRL_PASS_ON:-} " in *" $name "*) continue ;; esac
    command unset "$name" 2> /dev/null || :
done
folder=${AGENTRL_ATTEMPT_FOLDER:-${TMPDIR:-/tmp}}
mkdir -p "$folder"
HOME=$(mktemp -d "$folder/home-XXXXXX"); export HOME AGENTRL_ALONE=1
trap 'rm -rf "$HOME"' EXIT
trap 'exit 143' TERM
case $1 in /*) script=$1 ;; *) script=$PWD/$1 ;; esac
shift
if [ -n "${AGENTRL_ATTEMPT_FOLDER:-}" ]; then  # which tasks with a repository do not have
    mkdir "$HOME/work"; cd "$HOME/work"
fi
unset AGENTRL_ATTEMPT_FOLDER AGENTRL_PASS_ON
sh "$script" "$@"
