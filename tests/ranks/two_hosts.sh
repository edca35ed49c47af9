#!/usr/bin/env bash
# Two hosts that are really two: network namespaces with a cable (veth) between them and names of their own. Two ranks on
# each train together; then the cable is cut. mpirun and all ranks must end with a status that is not 0 within 60
# seconds, and the newest checkpoint must be whole and go on on one rank.
# usage: tests/ranks/two_hosts.sh PALIMPSEST        as root or with sudo, with iproute2
set -euo pipefail

program=$(realpath "$1")
here=$(dirname "$(realpath "$0")")
if ((EUID != 0)); then
  exec sudo env "PATH=$PATH" "$0" "$program"
fi

id=$$
alpha=pal-$id-a
beta=pal-$id-b
work=$(mktemp -d /tmp/palimpsest-hosts-XXXXXX)
job=

fail() {
  echo "FAILED: $*" >&2
  echo "-- the job's output:" >&2
  cat "$work/log" >&2 2> /dev/null || true
  exit 1
}

pids_in() { ip netns pids "$1" 2> /dev/null || true; }

clean_up() {
  local pid host
  for host in "$alpha" "$beta"; do
    for pid in $(pids_in "$host"); do kill -KILL "$pid" 2> /dev/null || true; done
    ip netns del "$host" 2> /dev/null || true
    rm -rf "/etc/netns/$host"
  done
  rm -rf "$work"
}
trap clean_up EXIT

# ---- the hosts ----
ip netns add "$alpha"
ip netns add "$beta"
ip link add "va$id" netns "$alpha" type veth peer name "vb$id" netns "$beta"
ip -n "$alpha" addr add 10.77.0.1/24 dev "va$id"
ip -n "$beta" addr add 10.77.0.2/24 dev "vb$id"
for host in "$alpha" "$beta"; do
  ip -n "$host" link set lo up
  mkdir -p "/etc/netns/$host"
  printf '127.0.0.1 localhost\n10.77.0.1 alpha\n10.77.0.2 beta\n' > "/etc/netns/$host/hosts"  # seen as /etc/hosts there
done
ip -n "$alpha" link set "va$id" up
ip -n "$beta" link set "vb$id" up

# What mpirun calls in place of ssh: NAME and the words of a command.
cat > "$work/agent" << END
#!/bin/sh
host=\$1; shift
case \$host in alpha) ns=$alpha ;; *) ns=$beta ;; esac
exec ip netns exec \$ns unshare --uts sh -c 'hostname "\$0" && exec sh -c "\$1"' "\$host" "\$*"
END
chmod +x "$work/agent"

# ---- the run ----
for i in $(seq 1 200); do echo "in the beginning was the word, number $((i % 7))."; done > "$work/text.txt"
"$program" tokenize --out "$work/shards" "$work/text.txt" > /dev/null
cat > "$work/config.yaml" << END
run: {dir: $work/run}
model: {vocab_size: 258, hidden_size: 32, num_layers: 2, layers: [kda, mla],
        kda: {num_heads: 2, head_dim: 8, conv_size: 4, gate_lower_bound: -5},
        mla: {num_heads: 2, kv_lora_rank: 16, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8},
        mlp: {intermediate_size: 64}}
data: {train: $work/shards, sequence_length: 64}
train: {steps: 100000000, sequences_per_step: 8, micro_batch: 2}
parallel: {tensor: 2}
checkpoint: {every: 20}
hardware: {peak_tflops: 0.1}
END

export OMPI_MCA_plm_rsh_agent=$work/agent
export OMPI_MCA_btl_tcp_if_include=10.77.0.0/24 OMPI_MCA_oob_tcp_if_include=10.77.0.0/24
export OMPI_MCA_btl=self,vader,tcp OMPI_MCA_pml=ob1
export OMP_NUM_THREADS=1
"$work/agent" alpha "exec '$here/../../launch/mpirun.sh' --oversubscribe -n 4 --host alpha:2,beta:2 --map-by slot \
  '$program' train '$work/config.yaml'" > "$work/log" 2>&1 &
job=$!

newest_checkpoint() { ls -d "$work"/run/checkpoints/step-*[0-9]/manifest.json 2> /dev/null | tail -1; }
for ((i = 0; ; ++i)); do
  [[ -n $(newest_checkpoint) ]] && break
  kill -0 "$job" 2> /dev/null || fail "the job ended before its first checkpoint"
  ((i < 1200)) || fail "no checkpoint within two minutes"
  sleep 0.1
done
for name in alpha beta; do
  grep -Eq "^ +[0-9]+  $name " "$work/log" || fail "no rank on host $name"
done
(($(pids_in "$beta" | wc -l) >= 3)) || fail "mpirun's daemon and two ranks were expected in $beta"

# ---- the cut ----
ip -n "$beta" link set "vb$id" down
cut=$SECONDS
running() {
  local pid
  kill -0 "$job" 2> /dev/null && return 0
  for pid in $(pids_in "$alpha") $(pids_in "$beta"); do kill -0 "$pid" 2> /dev/null && return 0; done
  return 1
}
while running; do
  ((SECONDS - cut < 60)) || fail "still running 60 seconds after the cut: $(pids_in "$alpha" | xargs) and $(pids_in "$beta" | xargs)"
  sleep 0.2
done
status=0
wait "$job" || status=$?
((status != 0)) || fail "the job ended with status 0"
echo "all ranks ended $((SECONDS - cut)) s after the cut, status $status"

# ---- what is left ----
newest=$(dirname "$(newest_checkpoint)")
"$program" inspect --verify "$newest" || fail "$newest is damaged"
step=$((10#${newest##*-}))
"$program" train "$work/config.yaml" "train.steps=$((step + 2))" parallel.tensor=1 > "$work/again" 2>&1 ||
  { cat "$work/again" >&2; fail "the run does not go on"; }
grep -q "resumed from $newest" "$work/again" || { cat "$work/again" >&2; fail "not resumed from $newest"; }
echo "resumed from $(basename "$newest") on one rank"
