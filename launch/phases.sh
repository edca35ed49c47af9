# Sourced by the scripts beside it: runs the phases of a script, times each, and prints the table at the end.

phase_names=()
phase_seconds=()
script_start=$SECONDS

# phase NAME COMMAND...: runs the command and remembers how long it took. A failing command ends the script.
phase() {
  local name=$1 start=$SECONDS
  shift
  printf '== %s\n' "$name"
  "$@"
  phase_names+=("$name")
  phase_seconds+=($((SECONDS - start)))
}

# print_phases: seconds of each phase and of all.
print_phases() {
  local i
  printf '%-42s %8s\n' "phase" "seconds"
  for i in "${!phase_names[@]}"; do printf '%-42s %8d\n' "${phase_names[$i]}" "${phase_seconds[$i]}"; done
  printf '%-42s %8d\n' "total" $((SECONDS - script_start))
}
