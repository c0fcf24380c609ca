#!/bin/bash
{% block header -%}
{% for option in options -%}
#SBATCH {{ option }}
{% endfor -%}
{% endblock %}
{%- for line in comment %}
# {{ line }}
{%- endfor %}
set -uo pipefail
{% block setup -%}
cd {{ directory }} || exit 1
{% if venv -%}
source {{ venv }}/bin/activate || exit 1
{% endif -%}
{% for name, value in environment -%}
export {{ name }}={{ value }}
{% endfor -%}
{% if secrets -%}
source {{ secrets }} || exit 1                          # keys
{% endif -%}
{% endblock -%}
{% block nodes -%}
job=${SLURM_JOB_ID:-}                                   # empty: the script was started by hand, without SLURM
export TANDEM_SLURM_JOB=$job
rendezvous_port=$((10000 + ${job:-$$} % 1000))          # of the job's own, where jobs share a node
serving_port=$((11000 + ${job:-$$} % 1000))
{% if nodes > 1 -%}
: "${SLURM_JOB_NODELIST:?this is a job of {{ nodes }} nodes; submit it with sbatch}"
address() { scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export TANDEM_TRAINER_NODES=$(IFS=,; echo "${nodes[*]:0:{{ nodes - serving }}}")
export TANDEM_RENDEZVOUS=$(address "${nodes[0]}"):$rendezvous_port
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
{% endif -%}
{% endblock %}
{% block run -%}
{% if run -%}
# Where to begin: as the command was given; from the newest checkpoint once there is one.
mode=({{ first }})
if {{ goes_on }}; then
  mode=(--clean)
  complete=({{ run }}/checkpoints/step_*/manifest.json)  # the pattern itself where there is none
  if [ -e "${complete[0]}" ]; then mode=(--resume); fi
fi
{% else -%}
mode=()
{% endif %}
# SLURM's warning before the time limit: save a checkpoint
{%- if requeues %}, then be queued again. SIGTERM: save a checkpoint and end.{% else %} and end, as on SIGTERM.{% endif %}
requeue=no
stop=no
main=
trap 'requeue=yes; stop=yes; kill -TERM $main 2> /dev/null' USR1
trap 'stop=yes; kill -TERM $main 2> /dev/null' TERM INT
{% if serving -%}
# Inference servers on the last {{ serving }} of the nodes, {{ servers_per_node }} on each. The others have the trainer.
export TANDEM_API_KEY=${TANDEM_API_KEY:-$(head -c 24 /dev/urandom | base64 | tr '+/' '-_')}
servers=("${nodes[@]:{{ nodes - serving }}}")
export TANDEM_SERVERS=
for node in "${servers[@]}"; do
  for number in {% for number in range(servers_per_node) %}{{ number }} {% endfor %}; do
    TANDEM_SERVERS+=${TANDEM_SERVERS:+,}http://$(address "$node"):$((serving_port + 1000 * number))
  done
done
serve() {
  {% if servers_per_node > 1 -%}
  IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES:-}"     # each server has one of them
  export CUDA_VISIBLE_DEVICES=${gpus[$SLURM_LOCALID]:-}
  {% endif -%}
  local stopped=no server= code delay
  trap 'stopped=yes; kill -TERM $server 2> /dev/null' TERM INT
  for delay in {% for delay in delays %}{{ delay }} {% endfor %}none; do     # seconds before each restart
    setsid python -m tandem.entrypoints.inference @ {{ inference }} \
      --server.host 0.0.0.0 --server.port $((serving_port + 1000 * SLURM_LOCALID)) &
    server=$!
    if [ $stopped = yes ]; then kill -TERM $server; fi
    wait $server
    code=$?
    while kill -0 $server 2> /dev/null; do wait $server; code=$?; done
    kill -KILL -- -$server 2> /dev/null                 # whatever it has left behind would be in the way
    if [ $stopped = yes ]; then exit 0; fi
    # A user's mistake, or too many failures.
    if [ $code -eq 2 ] || [ $delay = none ]; then exit $code; fi
    echo "the server ended with exit code $code and is started again in $delay s" >&2
    sleep $delay & wait $!
    if [ $stopped = yes ]; then exit 0; fi
  done
}
export serving_port
export -f serve
cpus=$((${SLURM_CPUS_PER_TASK:-1} / {{ servers_per_node }}))
{{ srun }} --nodes={{ serving }} --ntasks={{ serving * servers_per_node }} --ntasks-per-node={{ servers_per_node }} \
  --nodelist="$(IFS=,; echo "${servers[*]}")" --cpus-per-task=$((cpus > 0 ? cpus : 1)) --overcommit \
  --overlap --output={{ prints }}/inference-%N-%t.log --open-mode=append -- bash -c serve &
inference=$!
trap 'kill -TERM $inference 2> /dev/null; wait' EXIT
{% endif -%}
{{ command }}{% if run %} "${mode[@]}"{% endif %} &
main=$!
if [ $stop = yes ]; then kill -TERM $main; fi             # it came while the command was being started
wait $main
code=$?
while kill -0 $main 2> /dev/null; do wait $main; code=$?; done     # a signal interrupts `wait`
{% endblock -%}
{% block after -%}
{% for line in after -%}
{{ line }}
{% endfor -%}
{% if requeues -%}
if [ $requeue = yes ] && [ $code -ne 0 ] && [ -n "$job" ]; then scontrol requeue "$job"; fi
{% endif -%}
exit $code
{% endblock %}
