#!/usr/bin/env bash
# Starts a command on many ranks with Open MPI, so that a run can be stopped with saving, and a lost host is noticed.
#   launch/mpirun.sh -n 4 build/palimpsest train CONFIG ...                     on this machine
#   launch/mpirun.sh -n 64 --hostfile HOSTS build/palimpsest train CONFIG ...   HOSTS: a line a host, "alpha slots=8"
# Everything goes to mpirun as it is. TERM and INT become USR1, for mpirun and for the ranks of this machine: all ranks
# save at the end of their step, also if only one was told, and the status is 0. (mpirun itself kills its ranks a second
# after a TERM.) A second TERM or INT ends the job at once. The status is mpirun's.
# Set PALIMPSEST_EXPORT="NAME ..." to pass more variables to the ranks of other hosts.
set -uo pipefail

if (($# == 0)); then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
command -v mpirun > /dev/null || { echo "launch/mpirun.sh: there is no mpirun; launch/setup.sh installs it" >&2; exit 2; }

# Without these, mpirun notices a lost host only after eight minutes: seconds until a silent connection is asked,
# between two questions, and how many stay without an answer.
export OMPI_MCA_oob_tcp_keepalive_time=${OMPI_MCA_oob_tcp_keepalive_time:-10}
export OMPI_MCA_oob_tcp_keepalive_intvl=${OMPI_MCA_oob_tcp_keepalive_intvl:-5}
export OMPI_MCA_oob_tcp_keepalive_probes=${OMPI_MCA_oob_tcp_keepalive_probes:-3}

options=()
# Threads that spin while they wait take the cores of the others.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
# Open MPI passes its own variables to all ranks; of the others, those of this host's environment are named.
for name in OMP_NUM_THREADS OMP_WAIT_POLICY OPENBLAS_CORETYPE HDF5_USE_FILE_LOCKING LD_LIBRARY_PATH PALIMPSEST_SHARE_GPUS \
  PALIMPSEST_LEAST_COPIED_BYTES "${!NCCL_@}" ${PALIMPSEST_EXPORT:-}; do
  [[ -v $name ]] && options+=(-x "$name")
done
# Containers run as root, and mpirun wants to be told that it may.
((EUID == 0)) && options+=(--allow-run-as-root)

# In a session of its own: a terminal sends its INT to all of its processes, and mpirun would end the job at once.
setsid mpirun "${options[@]}" "$@" &
child=$!

# The ranks that mpirun started on this machine: processes of its session that know their rank. Another host's are
# started by ssh, which a signal would end.
local_ranks() {
  local folder stat fields
  for folder in /proc/[0-9]*; do
    { stat=$(< "$folder/stat"); } 2> /dev/null || continue
    read -ra fields <<< "${stat##*) }"  # state, parent, group, session, ...: the name before them may hold spaces
    if [[ ${fields[3]:-} == "$child" ]] && grep -qz '^OMPI_COMM_WORLD_RANK=' "$folder/environ" 2> /dev/null; then
      echo "${folder#/proc/}"
    fi
  done
}

# mpirun should pass USR1 on to every rank, but can lose it (seen with Open MPI 4.1.6 and PMIx 5 of Ubuntu 24.04). One
# rank that is told is enough, so those within reach are told as well; where there are none, mpirun is asked again.
ask_to_stop() {
  local ranks
  ranks=$(local_ranks)
  kill -USR1 "$child" $ranks 2> /dev/null
  [[ -n $ranks ]] && return
  while sleep 10 && kill -USR1 "$child"; do :; done &> /dev/null &  # holds no pipe of whoever waits for the output's end
}

asked=false
interrupted=false
stop() {
  interrupted=true
  if $asked; then
    kill -TERM "$child" 2> /dev/null
  else
    asked=true
    echo "launch/mpirun.sh: asking all ranks to save and stop" >&2
    ask_to_stop
  fi
}
trap stop TERM INT USR1

# A signal interrupts `wait`, which then says nothing of the child.
while true; do
  interrupted=false
  wait "$child"
  status=$?
  $interrupted || break
done
exit "$status"
