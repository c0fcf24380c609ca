#!/usr/bin/env bash
# A tmux session for one run: a shell to type `rl …` in, and panes that follow the logs of trainer, orchestrator and
# inference. The panes are shells as well: `inference`, `orchestrator` and `trainer` can be started in them by hand.
#
#   bash scripts/tmux.sh                          session "tandem", run directory outputs/rl
#   bash scripts/tmux.sh -s exp1 -o outputs1      a session of this name; one that exists is used again
#   bash scripts/tmux.sh -s exp1 -k               ends it
#   -L SOCKET                                     a tmux server of its own
set -euo pipefail

usage() {
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit "$1"
}

refuse() {
    echo "tmux.sh: $1" >&2
    exit 2
}

session=tandem output_dir="" kill=false server=()
while getopts "s:o:L:kh" option; do
    case $option in
        s) session=$OPTARG ;;
        o) output_dir=$OPTARG ;;
        L) server=(-L "$OPTARG") ;;
        k) kill=true ;;
        h) usage 0 ;;
        *) usage 2 >&2 ;;
    esac
done
shift $((OPTIND - 1))
[ $# -eq 0 ] || refuse "'$1' is not an option; give a session as -s NAME and a run directory as -o DIRECTORY"
[[ $session =~ ^[A-Za-z0-9_-]+$ ]] || refuse "-s '$session': give a name of letters, digits, - and _"
command -v tmux > /dev/null || refuse "tmux is not installed: apt-get install tmux, or brew install tmux"

tmux_() { tmux "${server[@]}" "$@"; }
absolute() { case $1 in /*) echo "${1%/}" ;; *) echo "$PWD/${1%/}" ;; esac; }
exists() { tmux_ has-session -t "=$session" 2> /dev/null; }

if $kill; then
    exists || refuse "there is no session '$session'"
    tmux_ kill-session -t "=$session"
    echo "ended session $session"
    exit 0
fi

# The followers end with their shells, where tail can do that by itself.
with_shell=""
if tail --help 2> /dev/null | grep -q -e --pid; then with_shell='--pid=$$'; fi

# A pane with its title at the border, whose shell follows log files that may not be there yet.
pane() {
    local target=$1 title=$2 files="" name
    shift 2
    tmux_ select-pane -t "$target" -T "$title"
    for name in "$@"; do files+=" $(printf %q "$output_dir/logs/$name.log")"; done
    tmux_ send-keys -t "$target" "tail $with_shell -q -n 100 -F$files 2> /dev/null & clear" Enter
}

if exists; then
    follows=$(tmux_ show-options -v -t "=$session:" @output_dir 2> /dev/null || true)
    if [ -n "$output_dir" ] && [ "$(absolute "$output_dir")" != "$follows" ]; then
        refuse "session '$session' follows $follows; choose another name, or end it: bash scripts/tmux.sh -s $session -k"
    fi
else
    output_dir=$(absolute "${output_dir:-outputs/rl}")
    run=$(tmux_ new-session -d -P -F '#{pane_id}' -s "$session" -n "$session" -x 220 -y 50)
    tmux_ set-option -t "=$session:" @output_dir "$output_dir"
    tmux_ set-option -t "=$session:" pane-border-status top
    tmux_ set-option -t "=$session:" pane-border-format ' #{pane_title} '
    trainer=$(tmux_ split-window -v -l 75% -P -F '#{pane_id}' -t "$run")
    orchestrator=$(tmux_ split-window -v -l 66% -P -F '#{pane_id}' -t "$trainer")
    inference=$(tmux_ split-window -v -l 50% -P -F '#{pane_id}' -t "$orchestrator")
    tmux_ select-pane -t "$run" -T Run
    pane "$trainer" Trainer trainer
    pane "$orchestrator" Orchestrator orchestrator
    pane "$inference" Inference inference inference_{0..7}
    tmux_ select-pane -t "$run"
fi

if [ ! -t 1 ]; then
    echo "session $session is ready: tmux ${server[*]:+${server[*]} }attach -t $session"
elif [ -n "${TMUX:-}" ]; then
    tmux_ switch-client -t "=$session"
else
    tmux_ attach-session -t "=$session"
fi
